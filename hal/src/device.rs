//! `Device`: memory, transfers, order and capture.

use std::path::PathBuf;

use crate::caps::{Caps, OpBounds, OpKey, Support};
use crate::counters::Counters;
use crate::error::{Error, Result};
use crate::plan::PlanView;
use crate::profile::{Detail, Mark, Profile};
use crate::tensor::Tensor;
use crate::transfer::{Sent, Span};

/// The four memories a server is made of. Each is counted before it is reserved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Pool {
    /// Base weights and constant tables.
    Weights,
    /// Keys and values.
    KvCache,
    /// The adapter arena and its table.
    Adapters,
    /// Activations, plans, results and operators' workspace.
    Scratch,
}

impl Pool {
    /// All pools, in the order reports list them.
    pub const ALL: [Pool; 4] = [Pool::Weights, Pool::KvCache, Pool::Adapters, Pool::Scratch];
}

impl std::fmt::Display for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Pool::Weights => "weights",
            Pool::KvCache => "kv-cache",
            Pool::Adapters => "adapters",
            Pool::Scratch => "scratch",
        })
    }
}

/// How to open a device.
#[derive(Debug, Clone, Default)]
pub struct DeviceConfig {
    /// Which of several devices of the kind.
    pub ordinal: usize,
    /// Most bytes that may be reserved over all pools; `None`: what the device has.
    pub memory_limit: Option<usize>,
    /// Threads for backends that compute on the host; `None`: one for each core.
    pub threads: Option<usize>,
    /// Vendor library to load instead of the one that would be found.
    pub library: Option<PathBuf>,
    /// Folder of tuning data, which goes before what a backend knows of itself. One without kernels to
    /// choose from refuses it.
    pub tuned: Option<PathBuf>,
}

/// Bytes reserved from each pool.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryReport {
    /// Reserved bytes, in the order of [`Pool::ALL`].
    pub reserved: [usize; 4],
    /// Bytes that may be reserved over all pools. Lower than at first once a reservation has found memory
    /// gone that others took meanwhile.
    pub limit: usize,
}

impl MemoryReport {
    /// Reserved bytes of one pool.
    pub fn pool(&self, pool: Pool) -> usize {
        self.reserved[pool as usize]
    }

    /// Reserved bytes of all pools.
    pub fn total(&self) -> usize {
        self.reserved.iter().sum()
    }
}

/// What a stream is for; two streams meet only through an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamRole {
    /// The step path.
    Compute,
    /// The adapter store.
    Copy,
}

/// Device bytes with a length. Dropping waits for the device, which never happens once sealed.
#[allow(clippy::len_without_is_empty)] // Empty reservations do not exist.
pub trait DeviceBytes: Send + Sync + std::fmt::Debug {
    /// Bytes.
    fn len(&self) -> usize;
}

/// Host bytes that transfers use; pinned where the platform has pinned memory.
pub trait HostBytes: Send + std::fmt::Debug {
    /// The bytes, for reading.
    fn bytes(&self) -> &[u8];
    /// The bytes, for writing.
    fn bytes_mut(&mut self) -> &mut [u8];
}

/// One open device; clones are cheap handles to the same device.
pub trait Device: Clone + Send + Sync + Sized + std::fmt::Debug + 'static {
    /// The name that `--backend` takes.
    const NAME: &'static str;
    /// Device bytes.
    type Buffer: DeviceBytes;
    /// Host bytes for transfers.
    type Host: HostBytes;
    /// An in-order queue; `&mut` to enqueue, so one writer and program order.
    type Stream: Send;
    /// A point in a stream.
    type Event: Send + Sync + std::fmt::Debug;
    /// A recorded stretch of a stream.
    type Graph: Send;

    /// Opens the device.
    ///
    /// # Errors
    /// There is none, its library is missing, or the configuration asks for what it lacks.
    fn open(config: &DeviceConfig) -> Result<Self>;

    /// Facts about the device.
    fn caps(&self) -> &Caps;

    /// What whoever starts it should be told of how it was opened, a line each.
    fn notes(&self) -> &[String] {
        &[]
    }

    /// Whether and how an operator runs at these types.
    fn supports(&self, key: &OpKey) -> Support;

    /// Reserved bytes by pool.
    fn memory(&self) -> MemoryReport;

    /// Totals since the device was opened.
    fn counters(&self) -> Counters;

    /// Takes bytes from a pool, aligned to at least [`crate::ALIGN`] and **zeroed**.
    ///
    /// # Errors
    /// `OutOfMemory`, or `Sealed` after [`Device::seal`].
    fn reserve(&self, pool: Pool, bytes: usize) -> Result<Self::Buffer>;

    /// Host bytes for transfers, zeroed.
    ///
    /// # Errors
    /// `OutOfMemory`, or `Driver` where pinning fails.
    fn reserve_host(&self, bytes: usize) -> Result<Self::Host>;

    /// Most workspace bytes that an operator takes within these bounds. Pure.
    fn workspace(&self, bounds: &OpBounds) -> usize;

    /// From here on [`Device::reserve`] and [`Device::stream`] return `Sealed`.
    fn seal(&self);

    /// Copies `spans` of `src` into the dense tensor `dst`, in stream order.
    ///
    /// # Errors
    /// A span leaves a side, `dst` is not dense, or the driver refuses; the buffer comes back.
    fn upload(
        &self,
        stream: &mut Self::Stream,
        src: Self::Host,
        spans: &[Span],
        dst: &mut Tensor<Self>,
    ) -> Sent<Self>;

    /// Copies the dense tensor `src` to the front of `dst`, in stream order.
    ///
    /// # Errors
    /// `dst` is too small, `src` is not dense, or the driver refuses; the buffer comes back.
    fn download(
        &self,
        stream: &mut Self::Stream,
        src: &Tensor<Self>,
        dst: Self::Host,
    ) -> Sent<Self>;

    /// A new stream. Its operators share `workspace` bytes, whose address never changes, so that
    /// captures stay valid. `workspace` is the largest [`Device::workspace`] of what will run.
    ///
    /// # Errors
    /// `OutOfMemory`, `Sealed` or `Driver`.
    fn stream(&self, role: StreamRole, workspace: usize) -> Result<Self::Stream>;

    /// An event behind everything enqueued so far.
    ///
    /// # Errors
    /// `Driver` or `Lost`.
    fn record(&self, stream: &mut Self::Stream) -> Result<Self::Event>;

    /// Makes `stream` wait for `event`; the host goes on.
    ///
    /// # Errors
    /// `Driver` or `Lost`.
    fn wait(&self, stream: &mut Self::Stream, event: &Self::Event) -> Result<()>;

    /// Whether `event` has passed; the host only looks.
    ///
    /// # Errors
    /// `Lost`.
    fn is_done(&self, event: &Self::Event) -> Result<bool>;

    /// Waits on the host until `event` has passed.
    ///
    /// # Errors
    /// `Lost`.
    fn block_on(&self, event: &Self::Event) -> Result<()>;

    /// Records what `body` enqueues instead of running it; only if `caps().graphs`. A closure, so
    /// that a capture cannot be left open.
    ///
    /// # Errors
    /// What `body` returns, `Invalid` without graphs, `Driver`.
    fn capture<F>(&self, stream: &mut Self::Stream, body: F) -> Result<Self::Graph>
    where
        F: FnOnce(&mut Self::Stream) -> Result<()>;

    /// Runs a recorded graph on the plan now at the addresses that were captured. `plan` has the
    /// host's mirror for backends whose graphs hold host integers; others ignore it.
    ///
    /// # Errors
    /// `Driver` or `Lost`.
    fn replay(
        &self,
        stream: &mut Self::Stream,
        graph: &Self::Graph,
        plan: &PlanView<Self>,
    ) -> Result<()>;

    /// Runs what `body` enqueues, waits for it, and tells where its time went. The waiting is no part of
    /// [`Counters::waits`], which counts those of a step.
    ///
    /// # Errors
    /// What `body` returns, `Driver`, `Lost`, and `Invalid` of a device that does not tell.
    fn profile<F>(&self, _stream: &mut Self::Stream, _: Detail, _body: F) -> Result<Profile>
    where
        F: FnOnce(&mut Self::Stream) -> Result<()>,
    {
        Err(Error::invalid("profile", format!("backend {} tells no times", Self::NAME)))
    }

    /// Hears what is put on the stream; does nothing unless a profile is taken or a profiler listens.
    fn mark(&self, _stream: &mut Self::Stream, _mark: Mark) {}
}
