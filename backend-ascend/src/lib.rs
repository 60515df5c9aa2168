//! `Ascend`: the contract on Huawei NPUs, through CANN's C ABI.
//!
//! Nothing is linked: the runtime and the operators are loaded by name when a device is opened, so
//! the crate builds and every process starts without CANN. Where a library is given, it alone is
//! opened; the host twin is such a library, and no code here asks which one it is.
//!
//! Three layers: `sys` has the vendor's signatures, `driver` owns what they hand out, `ops` and `aclnn`
//! are safe code on top. Base products are the vendor's, asked for in f32;
//! deltas, bias and the one rounding are a kernel of ours.
//!
//! So far: `linear`, `lora_linear` and `rms_norm`, with graphs. **None of it has run on an NPU**, only
//! on the host twin, which shows indexing, tiling and API use, and nothing about speed.

mod aclnn;
mod capability;
mod driver;
mod library;
mod ops;
mod sys;
mod tally;
mod tiling;

use std::sync::Arc;

use amphora_ascendc_kernels as kernels;
use amphora_hal::{
    Backend, Caps, Counters, DType, Device, DeviceConfig, Error, HostBytes, HostWeight,
    HostWeightMeta, MemoryReport, OpBounds, OpKey, OpKind, PlanView, Pool, Result, Returned,
    Scheme, Sent, Span, StreamRole, Support, Tensor, Weight, narrow,
};

use capability::{DTYPES, Found, RANK_CLASSES, is_known_family};
pub use driver::{Buffer, Event, Graph, PinnedMemory, Stream};
use driver::{Context, EventPool, Kernels, Pools, Stretch};
pub use library::bundled_twin;
pub use ops::grouped::GroupedProduct;
use sys::Api;
use tally::{Tally, count};

/// Bytes of one staging copy while a weight is packed.
const PACK_BYTES: usize = 4 << 20;

/// One open NPU; clones are handles to the same one.
#[derive(Debug, Clone)]
pub struct Ascend(Arc<Shared>);

// Field order is the order of dropping: functions and events go before the context.
#[derive(Debug)]
struct Shared {
    caps: Caps,
    found: Found,
    vector_cores: usize,
    kernels: Option<Kernels>,
    pools: Arc<Pools>,
    tally: Tally,
    events: Arc<EventPool>,
    context: Context,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.events.clear(&self.context);
    }
}

impl Ascend {
    fn kernels(&self) -> Option<&Kernels> {
        self.0.kernels.as_ref()
    }

    fn vector_cores(&self) -> usize {
        self.0.vector_cores
    }

    fn tile_rows(&self) -> usize {
        self.0.caps.tile_rows
    }

    /// Runs a [`GroupedProduct`]; the stream wants the workspace that a `Linear` of its sizes wants.
    ///
    /// # Errors
    /// A shape or type is another, or the driver's.
    pub fn grouped_product(&self, stream: &mut Stream, op: &GroupedProduct<'_>) -> Result<()> {
        ops::grouped::grouped(stream, op)?;
        self.launched(stream);
        Ok(())
    }

    /// Counts an operator, unless it was recorded: then its replays count.
    fn launched(&self, stream: &Stream) {
        if !stream.is_capturing() {
            count(&self.0.tally.launches, 1);
        }
    }
}

impl Device for Ascend {
    const NAME: &'static str = "ascend";
    type Buffer = Buffer;
    type Host = PinnedMemory;
    type Stream = Stream;
    type Event = Event;
    type Graph = Graph;

    fn open(config: &DeviceConfig) -> Result<Self> {
        if let Some(folder) = &config.tuned {
            return Err(Error::nothing_to_tune(Self::NAME, folder));
        }
        let given = config.library.as_deref();
        let (paths, runtimes) = library::candidates(given);
        let api = Api::shared(&paths, runtimes)?;
        let context = Context::open(api.clone(), config.ordinal)?;
        let soc = context.soc()?;
        // A binary that does not load is no reason to refuse the device: `supports` then says so.
        let kernels = library::kernel_binary(&soc, given)
            .and_then(|path| Kernels::load(&context, &path).ok());
        let norm = ["aclnnRmsNorm", "aclnnInplaceAdd", "aclnnInplaceCopy"];
        let found = Found {
            family: is_known_family(&soc),
            kernels: kernels.is_some(),
            matmul: api.has_operator("aclnnMatmul"),
            norm: norm.iter().all(|name| api.has_operator(name)),
        };
        // What the binary takes is not there for pools, nor is what other processes have.
        let memory = context.memory()?;
        let caps = Caps {
            name: format!("{soc} through {}", api.origin()),
            memory: memory.total,
            tile_rows: kernels::LORA_FUSED_ROWS,
            graphs: api.has_capture(),
            dtypes: &DTYPES,
            rank_classes: RANK_CLASSES,
            packs_rows: true,
        };
        let limit = config.memory_limit.map_or(memory.free, |limit| limit.min(memory.free));
        Ok(Ascend(Arc::new(Shared {
            caps,
            found,
            vector_cores: context.vector_cores()?,
            kernels,
            pools: Arc::new(Pools::new(limit)),
            tally: Tally::default(),
            events: Arc::default(),
            context,
        })))
    }

    fn caps(&self) -> &Caps {
        &self.0.caps
    }

    fn supports(&self, key: &OpKey) -> Support {
        capability::support(&self.0.found, key)
    }

    fn memory(&self) -> MemoryReport {
        self.0.pools.report()
    }

    fn counters(&self) -> Counters {
        // The one binary of kernels was compiled long before.
        let modules = u64::from(self.0.kernels.is_some());
        Counters { modules, ..self.0.tally.totals() }
    }

    fn reserve(&self, pool: Pool, bytes: usize) -> Result<Buffer> {
        let buffer = self.0.pools.reserve(&self.0.context, pool, bytes)?;
        count(&self.0.tally.allocations, 1);
        Ok(buffer)
    }

    fn reserve_host(&self, bytes: usize) -> Result<PinnedMemory> {
        PinnedMemory::new(&self.0.context, bytes)
    }

    fn workspace(&self, bounds: &OpBounds) -> usize {
        capability::workspace(bounds)
    }

    fn seal(&self) {
        self.0.pools.seal();
    }

    fn upload(
        &self,
        stream: &mut Stream,
        src: PinnedMemory,
        spans: &[Span],
        dst: &mut Tensor<Self>,
    ) -> Sent<Self> {
        let bytes = spans.iter().map(|span| span.len).sum();
        let sent = match stretch("upload", dst) {
            Ok(to) => driver::upload(self, stream, (src, spans), to)?,
            Err(error) => return Err(Returned { host: src, error }),
        };
        count(&self.0.tally.uploads, 1);
        count(&self.0.tally.upload_bytes, bytes);
        Ok(sent)
    }

    fn download(&self, stream: &mut Stream, src: &Tensor<Self>, dst: PinnedMemory) -> Sent<Self> {
        let sent = match stretch("download", src) {
            Ok(from) => driver::download(self, stream, from, dst)?,
            Err(error) => return Err(Returned { host: dst, error }),
        };
        count(&self.0.tally.downloads, 1);
        count(&self.0.tally.download_bytes, src.bytes());
        Ok(sent)
    }

    fn stream(&self, _role: StreamRole, workspace: usize) -> Result<Stream> {
        self.0.pools.check_open(Pool::Scratch, workspace)?;
        let workspace = match workspace {
            0 => None,
            bytes => Some(self.reserve(Pool::Scratch, bytes)?),
        };
        Stream::new(&self.0.context, &self.0.events, workspace)
    }

    fn record(&self, stream: &mut Stream) -> Result<Event> {
        stream.record()
    }

    fn wait(&self, stream: &mut Stream, event: &Event) -> Result<()> {
        stream.wait(event)
    }

    fn is_done(&self, event: &Event) -> Result<bool> {
        event.is_done()
    }

    fn block_on(&self, event: &Event) -> Result<()> {
        if event.is_done()? {
            return Ok(());
        }
        count(&self.0.tally.waits, 1);
        event.synchronize()
    }

    fn capture<F>(&self, stream: &mut Stream, body: F) -> Result<Graph>
    where
        F: FnOnce(&mut Stream) -> Result<()>,
    {
        stream.capture(body)
    }

    fn replay(&self, stream: &mut Stream, graph: &Graph, _plan: &PlanView<Self>) -> Result<()> {
        stream.replay(graph)?;
        count(&self.0.tally.replays, 1);
        Ok(())
    }
}

/// The bytes of a dense tensor.
fn stretch<'a>(op: &'static str, tensor: &'a Tensor<Ascend>) -> Result<Stretch<'a>> {
    if !tensor.shape().is_dense() {
        return Err(Error::invalid(op, format!("{} is not dense", tensor.shape())));
    }
    Ok(Stretch { buffer: tensor.buffer(), offset: tensor.offset(), bytes: tensor.bytes() })
}

/// The type of a dense scheme, which is all that is stored here.
fn dense_type(meta: &HostWeightMeta) -> Result<DType> {
    match meta.scheme {
        Scheme::Dense(dtype) if dtype.is_float() => Ok(dtype),
        scheme => Err(Error::Unsupported {
            key: OpKey::new(OpKind::Linear, DType::BF16).scheme(scheme),
            reason: "weights are stored dense in the compute type here",
        }),
    }
}

impl Backend for Ascend {
    fn packed_bytes(&self, meta: &HostWeightMeta) -> Result<usize> {
        let dtype = dense_type(meta)?;
        Ok(meta.matrices * meta.n * meta.k * dtype.size())
    }

    /// `[matrices, n, k]` row-major: the vendor takes the transposed view.
    fn pack(
        &self,
        stream: &mut Stream,
        weight: &HostWeight<'_>,
        into: Tensor<Self>,
    ) -> Result<Weight<Self>> {
        let meta = *weight.meta();
        let dtype = dense_type(&meta)?;
        let bytes = self.packed_bytes(&meta)?;
        if into.bytes() != bytes {
            let what = format!("{} bytes for {bytes}", into.bytes());
            return Err(Error::invalid("pack", what));
        }
        let row_bytes = meta.k * dtype.size();
        let rows_at_once = (PACK_BYTES / row_bytes).clamp(1, meta.n);
        let mut values = vec![0.0f32; rows_at_once * meta.k];
        let mut host = self.reserve_host(rows_at_once * row_bytes)?;
        let mut target = into.clone();
        for matrix in 0..meta.matrices {
            for first in (0..meta.n).step_by(rows_at_once) {
                let rows = rows_at_once.min(meta.n - first);
                let part = &mut values[..rows * meta.k];
                weight.decode(matrix, first, rows, part);
                narrow(part, dtype, &mut host.bytes_mut()[..rows * row_bytes]);
                let span = Span {
                    from: 0,
                    to: (matrix * meta.n + first) * row_bytes,
                    len: rows * row_bytes,
                };
                host = self.upload(stream, host, &[span], &mut target)?.finish()?;
            }
        }
        Ok(Weight::new(into, None, meta))
    }
}
