//! From files and settings to a running engine, in the one order that works: bounds, operators asked for,
//! weights, cache, adapters, step memory; then sealed, warmed up, and on its own thread.

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use amphora_hal::{
    Backend, Carver, Ctx, DType, Factor, LoraLayout, LoraShape, LoraTable, MemoryReport, OpKey,
    Pool, StreamRole,
};
use amphora_model::adapter::{AdapterBase, AdapterOptions};
use amphora_model::{
    Config, LoadOptions, LoadReport, Model, ModelFiles, Progress, StepLimits, op_keys,
    supported_paths, workspace,
};

use super::Engine;
use super::budget::{Budget, budget};
use super::link::{DeviceLink, Packer};
use super::no_room::NoRoom;
use crate::adapters::pages::Pages;
use crate::adapters::pool::{AdapterPool, HostTier, PoolError};
use crate::adapters::reader::Reader;
use crate::config::{AdapterConfig, Bounds, ConfigError, EngineConfig, ModelFacts};
use crate::executor::{Executor, Parts};
use crate::handle::{EngineHandle, Shared, Snapshot};
use crate::kv::KvBlocks;
use crate::metrics::StepReport;
use crate::plan::Planner;
use crate::scheduler::Scheduler;

/// Why an engine did not start, or why it stopped.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A setting.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The model's files.
    #[error(transparent)]
    Model(#[from] amphora_model::Error),
    /// The device.
    #[error(transparent)]
    Device(#[from] amphora_hal::Error),
    /// The device's memory does not hold what the start wants.
    #[error("{0}")]
    NoRoom(Box<NoRoom>),
    /// The wanted type of adapters is wider than what is computed in.
    #[error(
        "adapters are wanted in {wanted}, but backend {backend} computes in {computed} and keeps them \
         in that type, which does not hold every {wanted}; expected {computed}"
    )]
    AdapterDType {
        /// The backend.
        backend: &'static str,
        /// What was asked for.
        wanted: DType,
        /// The compute type.
        computed: DType,
    },
    /// The adapter store broke its own rules: a bug.
    #[error(transparent)]
    Adapters(#[from] crate::adapters::ledger::LedgerError),
    /// The system gives no thread.
    #[error("no thread for the engine: {0}")]
    Thread(#[from] std::io::Error),
    /// The engine's thread panicked: a bug.
    #[error("the engine's thread panicked")]
    Panicked,
}

impl From<PoolError> for EngineError {
    fn from(error: PoolError) -> Self {
        match error {
            PoolError::Device(error) => EngineError::Device(error),
            PoolError::Ledger(error) => EngineError::Adapters(error),
        }
    }
}

/// What an engine was started with, for the start-up report.
#[derive(Debug, Clone)]
pub struct StartReport {
    /// What was loaded.
    pub weights: LoadReport,
    /// Bytes of each pool.
    pub memory: MemoryReport,
    /// The bounds that follow from the settings.
    pub bounds: Bounds,
    /// Bytes of an adapter page; 0 without adapters.
    pub adapter_page_bytes: usize,
    /// How each operator runs.
    pub paths: Vec<(OpKey, &'static str)>,
}

/// A running engine.
#[derive(Debug)]
pub struct Started {
    /// For everyone who asks it something.
    pub handle: EngineHandle,
    /// For the one who waits for its end.
    pub thread: EngineThread,
    /// What it was started with.
    pub report: StartReport,
}

/// The engine's thread.
#[derive(Debug)]
pub struct EngineThread(JoinHandle<Result<(), PoolError>>);

impl EngineThread {
    /// Waits until the engine has stopped.
    ///
    /// # Errors
    /// The device failed.
    pub fn join(self) -> Result<(), EngineError> {
        self.0.join().map_err(|_| EngineError::Panicked)?.map_err(EngineError::from)
    }

    /// Whether it has stopped.
    pub fn is_finished(&self) -> bool {
        self.0.is_finished()
    }
}

/// The model to serve.
#[derive(Debug)]
pub struct ModelSource<'a> {
    /// Its folder.
    pub files: &'a ModelFiles,
    /// What its configuration says.
    pub config: Config,
    /// Compute type.
    pub dtype: DType,
}

/// Starts an engine on `device`.
///
/// # Errors
/// A setting that cannot be, an operator that the device lacks, files that do not load, or no room.
pub fn start<B: Backend>(
    device: B,
    model: ModelSource<'_>,
    settings: &EngineConfig,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Started, EngineError> {
    let planned = budget(&device, &model.config, model.dtype, settings)?;
    let plan = settings.bounds(&facts(&device, &model.config, model.dtype))?.plan;
    let kv = plan.kv_blocks * plan.block_size * planned.kv_per_position;
    let arena = settings.adapters.map_or(0, |adapters| adapters.arena_bytes);
    let opened = device.memory().limit;
    bring_up(device.clone(), model, settings, progress).map_err(|error| {
        let limit = device.memory().limit;
        let (adapters, taken) = (arena + planned.adapter_table, opened.saturating_sub(limit));
        told_with_budget(error, Asked { limit, taken, kv, adapters, planned })
    })
}

/// What a start asked of the device's memory beside the weights.
struct Asked {
    limit: usize,
    /// By others, meanwhile.
    taken: usize,
    kv: usize,
    adapters: usize,
    planned: Budget,
}

/// An error of a start; where a pool had no room, with the whole budget.
fn told_with_budget(error: EngineError, asked: Asked) -> EngineError {
    let (EngineError::Device(device) | EngineError::Model(amphora_model::Error::Device(device))) =
        &error
    else {
        return error;
    };
    let &amphora_hal::Error::OutOfMemory { pool, wanted, left } = device else { return error };
    let Asked { limit, taken, kv, adapters, planned } = asked;
    let reserved = limit.saturating_sub(left);
    // Pools are reserved in one order: workspace, weights, adapters, cache, and activations last.
    let in_front = match pool {
        Pool::Weights => reserved,
        Pool::Adapters => planned.workspace,
        Pool::KvCache => planned.workspace + adapters,
        Pool::Scratch => planned.workspace + adapters + kv,
    };
    let weights = match pool {
        Pool::Weights => Some(wanted),
        _ => reserved.checked_sub(in_front),
    };
    let scratch = planned.workspace + planned.activations;
    let kv_per_position = planned.kv_per_position;
    EngineError::NoRoom(Box::new(NoRoom {
        failed: pool,
        limit,
        taken,
        weights,
        adapters,
        kv,
        scratch,
        kv_per_position,
    }))
}

fn bring_up<B: Backend>(
    device: B,
    model: ModelSource<'_>,
    settings: &EngineConfig,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Started, EngineError> {
    let ModelSource { files, config, dtype } = model;
    if let Some(wanted) = settings.adapters.and_then(|adapters| adapters.dtype) {
        // f32 holds every f16 and bf16; of the two, neither holds the other.
        if wanted != dtype && dtype != DType::F32 {
            let backend = B::NAME;
            return Err(EngineError::AdapterDType { backend, wanted, computed: dtype });
        }
    }
    let bounds = settings.bounds(&facts(&device, &config, dtype))?;
    let limits = step_limits(&bounds, settings.adapters);
    let paths = supported_paths(&device, &op_keys(&device, &config, &limits, dtype))?;

    let compute_workspace = workspace(&device, &config, &limits);
    let mut stream = device.stream(StreamRole::Compute, compute_workspace)?;
    let options = LoadOptions { dtype, positions: bounds.plan.positions };
    let mut cx = Ctx { device: &device, stream: &mut stream };
    let model = Model::load(files, config, options, &mut cx, progress)?;
    let slices = model.slices().clone();
    let base = AdapterBase::from(model.config());
    let weights = *model.report();
    let layout = slices.layout().clone();
    let packer = settings.adapters.map(|adapters| {
        let options = AdapterOptions {
            max_rank: adapters.max_rank,
            square_orientation: adapters.orientation,
            round_to: adapters.dtype,
            ..AdapterOptions::default()
        };
        Arc::new(Packer { device: device.clone(), slices, base, options, dtype })
    });
    let adapters = match settings.adapters.zip(packer.clone()) {
        Some((adapters, packer)) => Some(adapter_pool(&layout, adapters, packer)?),
        None => None,
    };
    let mut executor = Executor::new(Parts {
        device: device.clone(),
        stream,
        model,
        bounds: bounds.clone(),
        step_limits: limits,
        dtype,
    })?;
    device.seal();
    executor.warm_up(adapters.as_ref().map(AdapterPool::table))?;

    let report = StartReport {
        weights,
        memory: device.memory(),
        adapter_page_bytes: adapters.as_ref().map_or(0, AdapterPool::page_bytes),
        paths,
        bounds: bounds.clone(),
    };
    let (sender, inbox) = channel();
    let shared = Arc::new(Shared {
        snapshot: Mutex::new(Snapshot::default()),
        closed: AtomicBool::new(false),
        next_id: AtomicU64::new(1),
        seed: random_seed(),
        limits: bounds.request,
    });
    let mut engine = Engine {
        in_flight: Default::default(),
        adapters,
        executor,
        scheduler: Scheduler::new(
            bounds.scheduler,
            KvBlocks::new(bounds.plan.kv_blocks, bounds.plan.block_size, settings.prefix_caching),
        ),
        planner: Planner::new(bounds.plan, bounds.buckets.clone()),
        inbox,
        shared: shared.clone(),
        stopping: None,
        settling: Vec::new(),
        look_ahead: settings.look_ahead,
        refused: 0,
        most_mixed: StepReport::default(),
        published: 0,
    };
    engine.publish();
    let thread = std::thread::Builder::new().name("engine".into()).spawn(move || engine.run())?;
    let handle = EngineHandle { link: Arc::new(DeviceLink { sender, packer }), shared };
    Ok(Started { handle, thread: EngineThread(thread), report })
}

pub(super) fn facts<B: Backend>(device: &B, config: &Config, dtype: DType) -> ModelFacts {
    let caps = device.caps();
    ModelFacts {
        vocab: config.vocab,
        max_positions: config.max_positions,
        kv_bytes_per_position: 2 * config.layers() * config.kv_width() * dtype.size(),
        tile_rows: caps.tile_rows,
        graphs: caps.graphs,
        largest_rank: caps.rank_classes.last().map_or(0, |class| class.get()),
    }
}

pub(super) fn step_limits(bounds: &Bounds, adapters: Option<AdapterConfig>) -> StepLimits {
    StepLimits {
        tokens: bounds.plan.tokens,
        sequences: bounds.plan.sequences,
        logit_rows: bounds.logit_rows(),
        context: bounds.plan.positions,
        slots: bounds.plan.slots,
        max_rank: adapters.map_or(0, |adapters| adapters.max_rank),
        tile_rows: bounds.plan.tile_rows,
    }
}

/// Reserves the arena and the table. Nothing else is reserved for adapters, whatever the limits.
fn adapter_pool<B: Backend>(
    layout: &Arc<LoraLayout>,
    config: AdapterConfig,
    packer: Arc<Packer<B>>,
) -> Result<AdapterPool<B>, EngineError> {
    let (device, dtype) = (&packer.device.clone(), packer.dtype);
    let pages = arena_pages(device, layout, config, dtype)?;
    let row_bytes = LoraTable::<B>::row_bytes(layout, config.slots);
    let arena = device.reserve(Pool::Adapters, config.arena_bytes)?;
    let rows = device.reserve(Pool::Adapters, row_bytes)?;
    let arena = Carver::new(arena).carve(&[config.arena_bytes], DType::U8)?;
    let rows = Carver::new(rows).carve(&[row_bytes / DType::I32.size()], DType::I32)?;
    let table = LoraTable::new(arena, rows, layout.clone(), config.slots, dtype)?;
    let copy_stream = device.stream(StreamRole::Copy, 0)?;
    let host = HostTier { bytes: config.host_bytes, reader: Reader::start(packer.reading())? };
    Ok(AdapterPool::new(device.clone(), copy_stream, (table, pages), host))
}

/// The arena's pages, as an engine cuts them.
///
/// # Errors
/// The arena has no room for one, or the device no class for the highest rank.
pub fn arena_pages<B: Backend>(
    device: &B,
    layout: &LoraLayout,
    config: AdapterConfig,
    dtype: DType,
) -> Result<Pages, EngineError> {
    let largest = largest_block(device, config.max_rank, layout, dtype)?;
    let pages = Pages::new(config.arena_bytes, largest);
    if pages.page_bytes() > config.arena_bytes {
        return Err(EngineError::Config(ConfigError {
            field: "adapters.arena_bytes",
            value: config.arena_bytes,
            expected: format!("at least a page of {} bytes is expected", pages.page_bytes()),
        }));
    }
    Ok(pages)
}

/// Bytes of the largest block that any adapter within the rank limit can have.
fn largest_block<B: Backend>(
    device: &B,
    max_rank: usize,
    layout: &LoraLayout,
    dtype: DType,
) -> Result<usize, EngineError> {
    let class = device.caps().rank_class(max_rank).ok_or_else(|| {
        amphora_hal::Error::invalid("adapter pool", format!("no rank class holds {max_rank}"))
    })?;
    let mut largest = 0;
    for (_, slice) in layout.slices() {
        for (factor, width) in [(Factor::A, slice.k), (Factor::B, slice.n)] {
            let bytes = device.lora_block(LoraShape { factor, width, dtype }, class)?;
            largest = largest.max(bytes);
        }
    }
    Ok(largest)
}

/// A number that differs from one start to the next: the standard library keys its hash maps with one.
fn random_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}
