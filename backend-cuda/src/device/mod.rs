//! `Device` for CUDA: pools, transfers, order and capture.

mod handles;
mod pools;
mod profile;
mod staging;
mod watched;

use std::sync::Arc;

use amphora_hal::{
    Caps, Counters, DType, Detail, Device, DeviceConfig, Error, HostBytes, InFlight, Mark,
    MemoryReport, OpBounds, OpKey, PlanView, Pool, Profile, RankClass, Result, Returned, Sent,
    Span, StreamRole, Support, Tensor,
};

use self::pools::{Pools, Tally, count};
use self::staging::Staging;
use crate::driver::cublaslt::CublasLt;
use crate::driver::nvtx::Nvtx;
use crate::driver::{self, Context, DeviceMemory, Graph, Limits, Part, PinnedMemory};
use crate::heuristics::{self, dense::Library};
use crate::jit::JitConfig;
use crate::kernels::{Kernels, Made};
use crate::tuning::{Loaded, Tuning};

pub use self::handles::{CudaBuffer, CudaEvent, CudaGraph, CudaHost, CudaStream};
pub use self::watched::{Launched, Launches};

/// One open GPU; clones are handles to the same.
#[derive(Debug, Clone)]
pub struct Cuda {
    inner: Arc<Inner>,
    /// What this handle's launches are chosen by.
    tuning: Arc<Tuning>,
    /// Where a test wants its launches noted.
    launches: Option<Arc<Launches>>,
}

#[derive(Debug)]
struct Inner {
    caps: Caps,
    kernels: Kernels,
    /// The vendor's dense products, where they are installed.
    products: Option<CublasLt>,
    /// Where the vendor's profilers are to be told what runs.
    nvtx: Option<Nvtx>,
    pools: Arc<Pools>,
    /// What weights go up through.
    staging: Staging,
    tally: Tally,
    /// What became of tuning data.
    notes: Vec<String>,
    /// Last: what is above was made in it.
    context: Arc<Context>,
}

impl Cuda {
    pub(crate) fn kernels(&self) -> &Kernels {
        &self.inner.kernels
    }

    /// What a launch must stay within.
    pub fn limits(&self) -> Limits {
        self.inner.context.limits()
    }

    /// The choices that launches are made by.
    pub(crate) fn tuning(&self) -> &Tuning {
        &self.tuning
    }

    /// The same device with other choices, for launches through the new handle. What was recorded before
    /// stays as it was.
    #[must_use]
    pub fn with_tuning(&self, tuning: Tuning) -> Self {
        Cuda { tuning: Arc::new(tuning), ..self.clone() }
    }

    /// The choices of this handle.
    pub fn choices(&self) -> Tuning {
        (*self.tuning).clone()
    }

    /// The vendor's dense products, where they are installed.
    pub(crate) fn products(&self) -> Option<&CublasLt> {
        self.inner.products.as_ref()
    }

    /// Counts an operator put on `stream`. One that is recorded is not put there yet.
    pub(crate) fn count_launch(&self, stream: &CudaStream) {
        count(&self.inner.tally.launches, usize::from(!stream.capturing));
    }

    fn allocate(&self, pool: Pool, bytes: usize) -> Result<CudaBuffer> {
        if bytes == 0 {
            return Err(Error::invalid("reserve", "no bytes"));
        }
        let reserved = self.inner.pools.take(pool, bytes)?;
        let memory =
            DeviceMemory::zeroed(&self.inner.context, bytes).map_err(|error| match error {
                // The limit allowed it, but another process has the memory.
                Error::Driver { call: "cuMemAlloc", code: driver::OUT_OF_MEMORY, .. } => {
                    let free = self.inner.context.memory().map_or(0, |(_, free)| free);
                    let left = self.inner.pools.found_free(&reserved, free);
                    Error::OutOfMemory { pool, wanted: bytes, left }
                }
                error => error,
            })?;
        count(&self.inner.tally.allocations, 1);
        Ok(CudaBuffer { memory, _reserved: reserved })
    }

    /// The transfer that `enqueue` puts on the stream. If anything fails behind it, the copy engine
    /// may use `host` still: it is given back only when the stream has come to rest, and else leaked.
    fn transfer(
        &self,
        stream: &mut CudaStream,
        mut host: CudaHost,
        enqueue: impl FnOnce(&mut driver::Stream, &mut PinnedMemory) -> Result<()>,
    ) -> Sent<Self> {
        let event = enqueue(&mut stream.raw, &mut host.0).and_then(|()| stream.raw.record());
        match event {
            Ok(event) => Ok(InFlight::new(self.clone(), host, CudaEvent(event))),
            Err(error) => {
                if stream.raw.synchronize().is_err() {
                    std::mem::forget(std::mem::replace(&mut host.0, PinnedMemory::empty()));
                }
                Err(Returned { host, error })
            }
        }
    }
}

fn dense(call: &'static str, tensor: &Tensor<Cuda>) -> Result<()> {
    if tensor.shape().is_dense() {
        return Ok(());
    }
    Err(Error::invalid(call, format!("{} is not dense", tensor.shape())))
}

impl Device for Cuda {
    const NAME: &'static str = "cuda";
    type Buffer = CudaBuffer;
    type Host = CudaHost;
    type Stream = CudaStream;
    type Event = CudaEvent;
    type Graph = CudaGraph;

    fn open(config: &DeviceConfig) -> Result<Self> {
        if let Some(library) = &config.library {
            // Another file than the loader's could not be kept from being mixed with it.
            return Err(Error::Driver {
                call: "dlopen",
                code: 0,
                message: format!(
                    "{}: the CUDA driver is the system's own and takes no path",
                    library.display()
                ),
            });
        }
        let context = Context::open(config.ordinal)?;
        let (name, (major, minor)) = (context.name()?, context.capability()?);
        let Some(architecture) = heuristics::architecture(major, minor) else {
            return Err(Error::Driver {
                call: "cuDeviceGetAttribute",
                code: 0,
                message: format!("{name} has compute capability {major}.{minor}; 8.0 is needed"),
            });
        };
        let settings = JitConfig::from_environment();
        let products = match CublasLt::open(&context, settings.cublaslt_dir.as_deref()) {
            Ok(products) => Some(products),
            Err(error) => {
                tracing::warn!("{error}; dense products of many rows run by kernels of our own");
                None
            }
        };
        let nvtx = settings.nvtx.then(Nvtx::open).and_then(|opened| match opened {
            Ok(nvtx) => Some(nvtx),
            Err(error) => {
                tracing::warn!("{error}; profilers see no ranges of operators and layers");
                None
            }
        });
        // Before kernels, which take their time: a wrong file is told at once.
        let loaded = Loaded::new(&name, context.limits(), config.tuned.as_deref())?;
        let asked = heuristics::tuned::units(&loaded.tuning, &architecture);
        let kernels = Kernels::load(&context, settings, &architecture, &asked)?;
        let (memory, free) = context.memory()?;
        let limit = config.memory_limit.map_or(free, |limit| limit.min(free));
        let inner = Inner {
            caps: Caps {
                name,
                memory,
                tile_rows: heuristics::PRODUCT.rows,
                graphs: true,
                dtypes: &[DType::F32, DType::F16, DType::BF16],
                rank_classes: RankClass::ALL,
                packs_rows: true,
            },
            kernels,
            products,
            nvtx,
            pools: Pools::new(limit),
            staging: Staging::default(),
            tally: Tally::default(),
            notes: loaded.notes,
            context,
        };
        Ok(Cuda { inner: Arc::new(inner), tuning: Arc::new(loaded.tuning), launches: None })
    }

    fn caps(&self) -> &Caps {
        &self.inner.caps
    }

    fn notes(&self) -> &[String] {
        &self.inner.notes
    }

    fn supports(&self, key: &OpKey) -> Support {
        crate::ops::supports(key)
    }

    fn memory(&self) -> MemoryReport {
        self.inner.pools.report()
    }

    fn counters(&self) -> Counters {
        let Made { compiled, loaded } = self.kernels().made();
        Counters { compilations: compiled, modules: loaded, ..self.inner.tally.counters() }
    }

    fn reserve(&self, pool: Pool, bytes: usize) -> Result<CudaBuffer> {
        self.allocate(pool, bytes)
    }

    fn reserve_host(&self, bytes: usize) -> Result<CudaHost> {
        PinnedMemory::zeroed(&self.inner.context, bytes).map(CudaHost)
    }

    fn workspace(&self, bounds: &OpBounds) -> usize {
        let library = if self.products().is_some() { Library::Present } else { Library::Absent };
        heuristics::workspace(bounds, library, &self.tuning)
    }

    fn seal(&self) {
        self.inner.pools.seal();
        // Whatever had to be loaded is.
        self.inner.staging.release();
    }

    fn upload(
        &self,
        stream: &mut CudaStream,
        src: CudaHost,
        spans: &[Span],
        dst: &mut Tensor<Self>,
    ) -> Sent<Self> {
        let sound = Span::check_all(spans, src.bytes().len(), dst.bytes())
            .and_then(|()| dense("upload", dst))
            .and_then(|()| stream.outside_capture("upload"));
        if let Err(error) = sound {
            return Err(Returned { host: src, error });
        }
        let sent = self.transfer(stream, src, |stream, host| {
            spans.iter().filter(|span| span.len > 0).try_for_each(|span| {
                let to = Part::new(&dst.buffer().memory, dst.offset() + span.to, span.len);
                stream.upload(host, span.from, to)
            })
        })?;
        count(&self.inner.tally.uploads, 1);
        count(&self.inner.tally.upload_bytes, spans.iter().map(|span| span.len).sum());
        Ok(sent)
    }

    fn download(&self, stream: &mut CudaStream, src: &Tensor<Self>, dst: CudaHost) -> Sent<Self> {
        let bytes = src.bytes();
        let sound = Span::check_all(&[Span::front(bytes)], dst.bytes().len(), bytes)
            .and_then(|()| dense("download", src))
            .and_then(|()| stream.outside_capture("download"));
        if let Err(error) = sound {
            return Err(Returned { host: dst, error });
        }
        let sent = self.transfer(stream, dst, |stream, host| {
            if bytes == 0 {
                return Ok(());
            }
            stream.download(Part::new(&src.buffer().memory, src.offset(), bytes), host)
        })?;
        count(&self.inner.tally.downloads, 1);
        count(&self.inner.tally.download_bytes, bytes);
        Ok(sent)
    }

    fn stream(&self, _role: StreamRole, workspace: usize) -> Result<CudaStream> {
        self.inner.pools.check_open(Pool::Scratch, workspace)?;
        let workspace = match workspace {
            0 => None,
            bytes => Some(self.allocate(Pool::Scratch, bytes)?),
        };
        let raw = driver::Stream::new(&self.inner.context)?;
        Ok(CudaStream::new(raw, workspace))
    }

    fn record(&self, stream: &mut CudaStream) -> Result<CudaEvent> {
        stream.outside_capture("record")?;
        stream.raw.record().map(CudaEvent)
    }

    fn wait(&self, stream: &mut CudaStream, event: &CudaEvent) -> Result<()> {
        stream.outside_capture("wait")?;
        stream.raw.wait(&event.0)
    }

    fn is_done(&self, event: &CudaEvent) -> Result<bool> {
        event.0.is_done()
    }

    /// Counts a wait only if there is one.
    fn block_on(&self, event: &CudaEvent) -> Result<()> {
        if event.0.is_done()? {
            return Ok(());
        }
        count(&self.inner.tally.waits, 1);
        event.0.synchronize()
    }

    fn capture<F>(&self, stream: &mut CudaStream, body: F) -> Result<CudaGraph>
    where
        F: FnOnce(&mut CudaStream) -> Result<()>,
    {
        stream.outside_capture("capture")?;
        stream.capturing = true;
        let graph = Graph::capture(stream, body);
        stream.capturing = false;
        graph.map(CudaGraph)
    }

    fn replay(
        &self,
        stream: &mut CudaStream,
        graph: &CudaGraph,
        _plan: &PlanView<Self>,
    ) -> Result<()> {
        stream.outside_capture("replay")?;
        graph.0.launch(&mut stream.raw)?;
        count(&self.inner.tally.replays, 1);
        Ok(())
    }

    fn profile<F>(&self, stream: &mut CudaStream, detail: Detail, body: F) -> Result<Profile>
    where
        F: FnOnce(&mut CudaStream) -> Result<()>,
    {
        self.profile_stretch(stream, detail, body)
    }

    fn mark(&self, stream: &mut CudaStream, mark: Mark) {
        if let Some(nvtx) = &self.inner.nvtx {
            stream.ranges.hear(nvtx, mark);
        }
        stream.hear(mark);
    }
}

impl Cuda {
    /// For tests alone: makes the device fault. A kernel, on a stream of its own, reads an address that
    /// is none; from then on every call of this process that needs the device fails, as after a fault in
    /// a step.
    ///
    /// # Errors
    /// The driver's, before anything has run.
    #[doc(hidden)]
    pub fn provoke_fault(&self) -> Result<()> {
        use amphora_cuda_kernels::args::WriteTokensArgs;
        use amphora_cuda_kernels::{DevicePtr, WRITE_TOKENS};

        let nowhere = DevicePtr(16);
        let args = WriteTokensArgs { prompt: nowhere, table: nowhere, sequences: 0, tokens: 1 };
        let raw = driver::Stream::new(&self.inner.context)?;
        let mut stream = CudaStream::new(raw, None);
        let one = heuristics::per_block(1);
        crate::launch::launch(self, &mut stream, WRITE_TOKENS, DType::F32, one, &args)
    }
}

impl Cuda {
    /// Copies pageable bytes into a dense tensor from byte `at` on, and waits. Load time only.
    pub(crate) fn upload_now(
        &self,
        stream: &mut CudaStream,
        bytes: &[u8],
        to: &Tensor<Self>,
        at: usize,
    ) -> Result<()> {
        stream.outside_capture("pack")?;
        dense("pack", to)?;
        Span::check_all(&[Span { from: 0, to: at, len: bytes.len() }], bytes.len(), to.bytes())?;
        let (context, place) = (&self.inner.context, (&to.buffer().memory, to.offset() + at));
        self.inner.staging.bring(context, &mut stream.raw, bytes, place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_driver_opening_says_so_in_one_line() {
        match Cuda::open(&DeviceConfig::default()) {
            Ok(device) => println!("NOT RUN: there is a GPU, {}", device.caps().name),
            Err(error) => {
                let text = error.to_string();
                assert!(matches!(error, Error::Driver { .. }), "{text}");
                assert!(!text.contains('\n') && text.len() > 20, "{text}");
            }
        }
    }

    #[test]
    fn a_library_by_path_is_refused() {
        let config =
            DeviceConfig { library: Some("/no/such.so".into()), ..DeviceConfig::default() };
        let error = Cuda::open(&config).expect_err("it takes no path").to_string();
        assert!(error.contains("/no/such.so"), "{error}");
    }
}
