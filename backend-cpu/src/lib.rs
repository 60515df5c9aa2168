//! `Cpu`: the contract on host memory. Reference, and embedded default.
//!
//! Each operator is one plain function over slices with f32 sums. One product kernel serves every row
//! count: weights are packed at load into panels of 16 outputs, and k is added in order whatever the
//! number of rows, threads or lanes, so a row's bits never depend on its batch. Streams run at once,
//! events are always done, there are no graphs.

mod lora;
mod memory;
mod ops;
mod product;
mod profile;
mod scratch;
mod simd;
mod threads;

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use amphora_hal::{
    Backend, Caps, Counters, DType, Detail, Device, DeviceConfig, Error, HostBytes, HostWeight,
    HostWeightMeta, InFlight, Mark, MemoryReport, OpBounds, OpKey, OpKind, PlanView, Pool, Profile,
    RankClass, Result, Returned, Sent, Span, StreamRole, Support, Tensor, Weight,
};

use memory::{Access, Memory};
pub use memory::{CpuBuffer, CpuHost};
use scratch::Scratch;
use simd::Level;
use threads::Threads;

/// Most rows of a tile: enough that an expert's panels are read few times, few enough that experts
/// spread over threads.
const TILE_ROWS: usize = 32;

/// The host as a device; clones are handles to the same one.
#[derive(Debug, Clone)]
pub struct Cpu(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    caps: Caps,
    limit: usize,
    reserved: [AtomicUsize; 4],
    sealed: AtomicBool,
    /// Whether a test has made it fault.
    lost: AtomicBool,
    tally: Tally,
    /// One operator or transfer at a time views buffers; see `memory`.
    lock: Mutex<()>,
    threads: Threads,
    level: Level,
}

#[derive(Debug, Default)]
struct Tally {
    uploads: AtomicU64,
    upload_bytes: AtomicU64,
    downloads: AtomicU64,
    download_bytes: AtomicU64,
    launches: AtomicU64,
    allocations: AtomicU64,
}

/// A reservation's share of a pool, given back with its buffer.
#[derive(Debug)]
pub(crate) struct Reserved {
    device: Cpu,
    pool: Pool,
    bytes: usize,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.device.0.reserved[self.pool as usize].fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// An in-order queue that runs what it is given at once.
#[derive(Debug)]
pub struct CpuStream {
    workspace: Memory,
    /// While a profile is taken.
    watch: Option<profile::Watch>,
    _reserved: Reserved,
}

/// A point in a [`CpuStream`]: always passed.
#[derive(Debug)]
pub struct CpuEvent;

/// There are no graphs on the CPU, so no value of this type.
#[derive(Debug)]
pub enum CpuGraph {}

impl Cpu {
    /// The right to view buffers. A poisoned lock is taken all the same: it guards no data of its own.
    fn access(&self) -> Access<'_> {
        Access::new(self, self.0.lock.lock().unwrap_or_else(|poisoned| poisoned.into_inner()))
    }

    /// For tests alone: makes the device fault. From then on every transfer and event fails, as on an
    /// accelerator behind a fault in a step.
    #[doc(hidden)]
    pub fn provoke_fault(&self) {
        self.0.lost.store(true, Ordering::Release);
    }

    fn is_sound(&self) -> Result<()> {
        if self.0.lost.load(Ordering::Acquire) {
            return Err(Error::Lost { message: "a test made it fault".to_owned() });
        }
        Ok(())
    }

    /// Whether both are handles to one device.
    fn is_same(&self, other: &Cpu) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// What an operator works with: the views, the stream's workspace, and a count of the launch.
    fn launch<'a>(&'a self, stream: &'a mut CpuStream) -> (Access<'a>, Scratch<'a>) {
        self.0.tally.launches.fetch_add(1, Ordering::Relaxed);
        (self.access(), Scratch::new(stream.workspace.bytes_mut()))
    }

    fn take(&self, pool: Pool, bytes: usize) -> Result<(Memory, Reserved)> {
        if self.0.sealed.load(Ordering::Acquire) {
            return Err(Error::Sealed { pool, wanted: bytes });
        }
        let left = self.0.limit.saturating_sub(self.memory().total());
        let out_of_memory = || Error::OutOfMemory { pool, wanted: bytes, left };
        if bytes > left {
            return Err(out_of_memory());
        }
        let memory = Memory::zeroed(bytes).ok_or_else(out_of_memory)?;
        self.0.reserved[pool as usize].fetch_add(bytes, Ordering::Relaxed);
        self.0.tally.allocations.fetch_add(1, Ordering::Relaxed);
        Ok((memory, Reserved { device: self.clone(), pool, bytes }))
    }
}

/// Bytes of physical memory, or what a process can address where the system does not say.
fn physical_memory() -> usize {
    let read = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = read.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib = line.and_then(|rest| rest.trim().trim_end_matches("kB").trim().parse::<usize>().ok());
    kib.map_or(isize::MAX as usize, |kib| kib * 1024)
}

impl Device for Cpu {
    const NAME: &'static str = "cpu";
    type Buffer = CpuBuffer;
    type Host = CpuHost;
    type Stream = CpuStream;
    type Event = CpuEvent;
    type Graph = CpuGraph;

    fn open(config: &DeviceConfig) -> Result<Self> {
        if config.ordinal != 0 || config.library.is_some() {
            return Err(Error::Driver {
                call: "Cpu::open",
                code: 0,
                message: "the CPU is one device and needs no library".to_owned(),
            });
        }
        if let Some(folder) = &config.tuned {
            return Err(Error::nothing_to_tune(Self::NAME, folder));
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = config.threads.unwrap_or(cores);
        let level = Level::detect();
        let memory = physical_memory();
        Ok(Cpu(Arc::new(Inner {
            caps: Caps {
                name: format!("CPU, {threads} threads, {}", level.name()),
                memory,
                tile_rows: TILE_ROWS,
                graphs: false,
                dtypes: &[DType::F32, DType::BF16],
                rank_classes: RankClass::ALL,
                packs_rows: false,
            },
            limit: config.memory_limit.unwrap_or(memory),
            reserved: Default::default(),
            sealed: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            tally: Tally::default(),
            lock: Mutex::new(()),
            threads: Threads::new(threads)?,
            level,
        })))
    }

    fn caps(&self) -> &Caps {
        &self.0.caps
    }

    fn supports(&self, key: &OpKey) -> Support {
        if !self.0.caps.dtypes.contains(&key.dtype) {
            return Support::No { reason: "the CPU computes in f32 and bf16" };
        }
        if key.scheme.is_some_and(|scheme| product::stored(scheme).is_err()) {
            return Support::No { reason: "the CPU stores weights as f32 or bf16" };
        }
        if key.class.is_some_and(|class| !self.0.caps.rank_classes.contains(&class)) {
            return Support::No { reason: "no such rank class" };
        }
        Support::Yes {
            path: match key.op {
                OpKind::Linear | OpKind::LoraLinear | OpKind::FusedMoe | OpKind::FusedMoeLora => {
                    "packed panels"
                }
                _ => "plain",
            },
        }
    }

    fn memory(&self) -> MemoryReport {
        MemoryReport {
            reserved: std::array::from_fn(|i| self.0.reserved[i].load(Ordering::Relaxed)),
            limit: self.0.limit,
        }
    }

    fn counters(&self) -> Counters {
        let tally = &self.0.tally;
        let read = |n: &AtomicU64| n.load(Ordering::Relaxed);
        Counters {
            uploads: read(&tally.uploads),
            upload_bytes: read(&tally.upload_bytes),
            downloads: read(&tally.downloads),
            download_bytes: read(&tally.download_bytes),
            launches: read(&tally.launches),
            replays: 0,
            waits: 0,
            allocations: read(&tally.allocations),
            compilations: 0,
            modules: 0,
        }
    }

    fn reserve(&self, pool: Pool, bytes: usize) -> Result<CpuBuffer> {
        let (memory, reserved) = self.take(pool, bytes)?;
        Ok(CpuBuffer::new(memory, reserved))
    }

    fn reserve_host(&self, bytes: usize) -> Result<CpuHost> {
        let left = self.0.caps.memory;
        let memory = Memory::zeroed(bytes);
        memory.map(CpuHost).ok_or(Error::OutOfMemory { pool: Pool::Scratch, wanted: bytes, left })
    }

    fn workspace(&self, bounds: &OpBounds) -> usize {
        ops::workspace(bounds, self.0.threads.parts(usize::MAX))
    }

    fn seal(&self) {
        self.0.sealed.store(true, Ordering::Release);
    }

    fn upload(
        &self,
        _stream: &mut CpuStream,
        src: CpuHost,
        spans: &[Span],
        dst: &mut Tensor<Self>,
    ) -> Sent<Self> {
        let sound = self
            .is_sound()
            .and_then(|()| Span::check_all(spans, src.bytes().len(), dst.bytes()))
            .and_then(|()| dense_bytes("upload", dst));
        let dst = match sound {
            Ok(dst) => dst,
            Err(error) => return Err(Returned { host: src, error }),
        };
        let access = self.access();
        let to = access.slice_mut::<u8>(&dst);
        for span in spans {
            to[span.to..][..span.len].copy_from_slice(&src.bytes()[span.from..][..span.len]);
        }
        drop(access);
        let bytes: usize = spans.iter().map(|span| span.len).sum();
        self.0.tally.uploads.fetch_add(1, Ordering::Relaxed);
        self.0.tally.upload_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(InFlight::new(self.clone(), src, CpuEvent))
    }

    fn download(
        &self,
        _stream: &mut CpuStream,
        src: &Tensor<Self>,
        mut dst: CpuHost,
    ) -> Sent<Self> {
        let span = Span::front(src.bytes());
        let sound = self
            .is_sound()
            .and_then(|()| Span::check_all(&[span], dst.bytes().len(), src.bytes()))
            .and_then(|()| dense_bytes("download", src));
        let src = match sound {
            Ok(src) => src,
            Err(error) => return Err(Returned { host: dst, error }),
        };
        let access = self.access();
        dst.bytes_mut()[..span.len].copy_from_slice(access.slice::<u8>(&src));
        drop(access);
        self.0.tally.downloads.fetch_add(1, Ordering::Relaxed);
        self.0.tally.download_bytes.fetch_add(span.len as u64, Ordering::Relaxed);
        Ok(InFlight::new(self.clone(), dst, CpuEvent))
    }

    fn stream(&self, _role: StreamRole, workspace: usize) -> Result<CpuStream> {
        let (workspace, reserved) = self.take(Pool::Scratch, workspace)?;
        Ok(CpuStream { workspace, watch: None, _reserved: reserved })
    }

    fn record(&self, _stream: &mut CpuStream) -> Result<CpuEvent> {
        self.is_sound().map(|()| CpuEvent)
    }

    fn wait(&self, _stream: &mut CpuStream, _event: &CpuEvent) -> Result<()> {
        self.is_sound()
    }

    fn is_done(&self, _event: &CpuEvent) -> Result<bool> {
        self.is_sound().map(|()| true)
    }

    /// Never waits, so it counts no wait.
    fn block_on(&self, _event: &CpuEvent) -> Result<()> {
        self.is_sound()
    }

    fn capture<F>(&self, _stream: &mut CpuStream, _body: F) -> Result<CpuGraph>
    where
        F: FnOnce(&mut CpuStream) -> Result<()>,
    {
        Err(Error::invalid("capture", "the CPU has no graphs, as its caps say"))
    }

    fn replay(&self, _: &mut CpuStream, graph: &CpuGraph, _: &PlanView<Self>) -> Result<()> {
        match *graph {}
    }

    fn profile<F>(&self, stream: &mut CpuStream, detail: Detail, body: F) -> Result<Profile>
    where
        F: FnOnce(&mut CpuStream) -> Result<()>,
    {
        profile::profile(stream, detail, body)
    }

    fn mark(&self, stream: &mut CpuStream, mark: Mark) {
        if let Some(watch) = &mut stream.watch {
            watch.hear(mark);
        }
    }
}

/// The bytes of a dense tensor as a tensor of their own.
fn dense_bytes(op: &'static str, tensor: &Tensor<Cpu>) -> Result<Tensor<Cpu>> {
    if !tensor.shape().is_dense() {
        return Err(Error::invalid(op, format!("{} is not dense", tensor.shape())));
    }
    Tensor::new(tensor.buffer().clone(), tensor.offset(), &[tensor.bytes()], DType::U8)
}

impl Backend for Cpu {
    fn packed_bytes(&self, meta: &HostWeightMeta) -> Result<usize> {
        product::packed_bytes(meta)
    }

    fn pack(
        &self,
        _stream: &mut CpuStream,
        weight: &HostWeight<'_>,
        into: Tensor<Self>,
    ) -> Result<Weight<Self>> {
        let meta = *weight.meta();
        let dtype = product::stored(meta.scheme)?;
        let bytes = product::packed_bytes(&meta)?;
        if into.dtype() != DType::U8 || into.bytes() != bytes || !into.shape().is_dense() {
            return Err(Error::invalid("pack", format!("{bytes} bytes into {}", into.shape())));
        }
        let access = self.access();
        product::pack(weight, dtype, access.slice_mut::<u8>(&into), &self.0.threads);
        let elements = bytes / dtype.size();
        let data = Tensor::new(into.buffer().clone(), into.offset(), &[elements], dtype)?;
        Ok(Weight::new(data, None, meta))
    }
}
