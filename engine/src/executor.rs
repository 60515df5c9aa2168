//! Runs planned steps: one upload, one forward pass or replay, one download. Blocks that forks copy come
//! before it, log-probabilities behind it, one operator at a time, in steps that ask for them alone.
//!
//! The plan's area, the results and the activations on the device are single: steps follow each other on
//! one stream, so a step's upload comes after everything that reads the plan before it. Host buffers
//! rotate, a set for each step in flight.

use std::sync::Arc;

use amphora_hal::ops::{LOGPROB_WORDS, Logprobs, RESULT_WORDS, Sample, WriteTokens};
use amphora_hal::{
    Backend, Bucket, Carver, Ctx, DType, Error, HostBytes, HostPlan, InFlight, LoraTable, PlanArea,
    PlanBuilder, PlanLayout, PlanView, Pool, Result, Tensor, TokenTable, carved_bytes,
};
use amphora_model::{Activations, KvCache, KvShape, Model, StepInputs, StepLimits};

use crate::config::Bounds;
use crate::graphs::{GraphKey, Graphs, warm_up_plan};
use crate::profiling::{Profiler, Profiling};
use crate::results::Downloads;
use crate::scheduler::{Chunk, StepResults};

/// Steps on the device at once: the one that runs and the one planned behind it.
pub const STEPS_IN_FLIGHT: usize = 2;

/// A step on the device.
#[derive(Debug)]
pub struct Running<B: Backend> {
    plan: Arc<HostPlan>,
    upload: InFlight<B>,
    results: InFlight<B>,
    logits: Option<InFlight<B>>,
    logprobs: Option<InFlight<B>>,
}

impl<B: Backend> Running<B> {
    /// The host's mirror of its plan.
    pub fn plan(&self) -> &HostPlan {
        &self.plan
    }

    /// Whether everything it brings is here; asks, never waits.
    ///
    /// # Errors
    /// The device is lost.
    pub fn is_done(&self) -> Result<bool> {
        let last = self.logprobs.as_ref().or(self.logits.as_ref());
        last.unwrap_or(&self.results).is_done()
    }
}

/// The memory that steps run on, and the model.
struct Pass<B: Backend> {
    model: Model<B>,
    kv: KvCache<B>,
    activations: Activations<B>,
    tokens: TokenTable<B>,
    /// `[sequences, 2]` i32.
    result: Tensor<B>,
    /// `[logit_rows, LOGPROB_WORDS]` i32.
    logprobs: Tensor<B>,
}

impl<B: Backend> Pass<B> {
    /// Puts one step on the stream.
    fn run(
        &mut self,
        cx: &mut Ctx<'_, B>,
        plan: &PlanView<B>,
        lora: Option<&LoraTable<B>>,
    ) -> Result<()> {
        WriteTokens { prompt: plan.prompt(), table: &mut self.tokens }.run(cx)?;
        let inputs = StepInputs {
            plan,
            tokens: &self.tokens,
            kv: &mut self.kv,
            activations: &mut self.activations,
            lora: lora.filter(|_| plan.host().any_lora()),
        };
        let logits = self.model.forward(cx, inputs, &mut ())?;
        let mut result = self.result.rows(plan.host().bucket.sequences)?;
        Sample { logits: &logits, plan, table: &mut self.tokens, result: &mut result }.run(cx)
    }

    /// Log-probabilities of the step that was put last, for the rows that ask; gives all rows.
    fn logprobs(&mut self, cx: &mut Ctx<'_, B>, plan: &PlanView<B>) -> Result<Tensor<B>> {
        let bucket = &plan.host().bucket;
        let logits = self.activations.logits(bucket)?;
        let mut out = self.logprobs.rows(bucket.logit_rows)?;
        Logprobs { logits: &logits, plan, table: &self.tokens, out: &mut out }.run(cx)?;
        Ok(out)
    }
}

/// The step path: stream, model, cache, plan area, and host buffers.
pub struct Executor<B: Backend> {
    // Graphs end before the stream, the stream before the memory that both use.
    graphs: Graphs<B>,
    stream: B::Stream,
    pass: Pass<B>,
    area: PlanArea<B>,
    bounds: Bounds,
    plan_hosts: Buffers<B>,
    result_hosts: Buffers<B>,
    logit_hosts: Buffers<B>,
    logprob_hosts: Buffers<B>,
    /// Whom steps are timed for.
    profiler: Option<Profiler>,
    device: B,
}

impl<B: Backend> Executor<B> {
    /// Reserves the cache and the step's memory behind a loaded model.
    ///
    /// # Errors
    /// A pool has no room.
    pub fn new(parts: Parts<B>) -> Result<Self> {
        let Parts { device, stream, model, bounds, step_limits, dtype } = parts;
        let (limits, config) = (bounds.plan, model.config());
        let shape = KvShape { blocks: limits.kv_blocks, block_size: limits.block_size };
        let kv = KvCache::reserve(&device, config, shape, dtype)?;
        let largest = Bucket {
            tokens: limits.tokens,
            sequences: limits.sequences,
            logit_rows: bounds.logit_rows(),
        };
        let plan_bytes = PlanLayout::new(&limits, largest)?.bytes();
        let table_dims = [limits.sequences + limits.tokens];
        let result_dims = [limits.sequences, RESULT_WORDS];
        let logprob_dims = [bounds.logit_rows(), LOGPROB_WORDS];
        let bytes = Activations::<B>::bytes(config, &step_limits, dtype)
            + carved_bytes(&[plan_bytes], DType::U8)
            + carved_bytes(&table_dims, DType::I32)
            + carved_bytes(&result_dims, DType::I32)
            + carved_bytes(&logprob_dims, DType::I32);
        let mut carver = Carver::new(device.reserve(Pool::Scratch, bytes)?);
        let activations = Activations::carve(&mut carver, config, &step_limits, dtype)?;
        let area = PlanArea::new(carver.carve(&[plan_bytes], DType::U8)?)?;
        let tokens = TokenTable::new(carver.carve(&table_dims, DType::I32)?, &limits)?;
        let result = carver.carve(&result_dims, DType::I32)?;
        let logprobs = carver.carve(&logprob_dims, DType::I32)?;
        let (result_bytes, logprob_bytes) = (result.bytes(), logprobs.bytes());
        // All rows beside those that draw come back where some are wanted.
        let beside = bounds.logit_rows() - limits.sequences;
        let logit_bytes = beside * limits.vocab * size_of::<f32>();
        let logit_sets = if bounds.scheduler.prompt_logit_rows > 0 { STEPS_IN_FLIGHT } else { 0 };
        Ok(Executor {
            graphs: Graphs::default(),
            stream,
            pass: Pass { model, kv, activations, tokens, result, logprobs },
            area,
            bounds,
            plan_hosts: Buffers::new(&device, STEPS_IN_FLIGHT, plan_bytes)?,
            result_hosts: Buffers::new(&device, STEPS_IN_FLIGHT, result_bytes)?,
            logit_hosts: Buffers::new(&device, logit_sets, logit_bytes)?,
            logprob_hosts: Buffers::new(&device, STEPS_IN_FLIGHT, logprob_bytes)?,
            profiler: None,
            device,
        })
    }

    /// Times the steps from here on, as long as somebody listens.
    pub fn profile(&mut self, profiler: Profiler) {
        self.profiler = Some(profiler);
    }

    /// The stream that steps run on, for what must come before the next one.
    pub fn compute(&mut self) -> &mut B::Stream {
        &mut self.stream
    }

    /// Runs a first step of each kind, so that what a device does once (compile, touch memory) is done
    /// before the first request, and records graphs where there are any.
    ///
    /// # Errors
    /// The device's; a reservation that was not counted shows here as `Sealed`.
    pub fn warm_up(&mut self, lora: Option<&LoraTable<B>>) -> Result<()> {
        let one_row = Bucket { tokens: 1, sequences: 1, logit_rows: 1 };
        let graphs = self.device.caps().graphs;
        let recorded: Vec<Bucket> = self.bounds.buckets.recorded().filter(|_| graphs).collect();
        let buckets = if recorded.is_empty() { vec![one_row] } else { recorded.clone() };
        for bucket in buckets {
            for any_lora in [false, true].into_iter().filter(|any| !any || lora.is_some()) {
                let key = GraphKey { bucket, any_lora };
                let plan = warm_up_plan(&self.bounds.plan, key)?;
                let running = self.execute(plan, lora)?;
                self.finish(running, &[])?;
                if !recorded.is_empty() {
                    self.record(key, lora)?;
                }
            }
        }
        Ok(())
    }

    fn record(&mut self, key: GraphKey, lora: Option<&LoraTable<B>>) -> Result<()> {
        let plan = warm_up_plan(&self.bounds.plan, key)?;
        let host = self.plan_hosts.take()?;
        let (view, upload) = plan.upload(&self.device, &mut self.stream, host, &self.area)?;
        let (device, pass) = (&self.device, &mut self.pass);
        let graph = device.capture(&mut self.stream, |stream| {
            pass.run(&mut Ctx { device, stream }, &view, lora)
        })?;
        self.graphs.insert(key, graph);
        self.plan_hosts.0.push(upload.finish()?);
        Ok(())
    }

    /// Puts a step on the stream and returns.
    ///
    /// # Errors
    /// The device's.
    pub fn execute(
        &mut self,
        plan: PlanBuilder,
        lora: Option<&LoraTable<B>>,
    ) -> Result<Running<B>> {
        let host = self.plan_hosts.take()?;
        let (view, upload) = plan.upload(&self.device, &mut self.stream, host, &self.area)?;
        let plan = view.host().clone();
        let key = GraphKey { bucket: plan.bucket, any_lora: plan.any_lora() };
        let mut cx = Ctx { device: &self.device, stream: &mut self.stream };
        if plan.any_copies() {
            self.pass.kv.copy_blocks(&mut cx, &view)?;
        }
        let in_parts = self.profiler.as_ref().is_some_and(|p| p.how == Profiling::Parts);
        let graph = self.graphs.get(&key).filter(|_| !in_parts);
        let (device, pass) = (&self.device, &mut self.pass);
        let mut step = |stream: &mut B::Stream| match graph {
            Some(graph) => device.replay(stream, graph, &view),
            None => pass.run(&mut Ctx { device, stream }, &view, lora),
        };
        match &self.profiler {
            None => step(cx.stream)?,
            Some(profiler) => {
                if !profiler.time(device, cx.stream, &plan, step)? {
                    self.profiler = None;
                }
            }
        }
        let result = self.pass.result.rows(plan.bucket.sequences)?;
        let results = self.device.download(cx.stream, &result, self.result_hosts.take()?)?;
        let mut logits = None;
        if plan.any_raw_logits() {
            let all = self.pass.activations.logits(&plan.bucket)?;
            let rows = all.narrow(0, plan.sampled, plan.logit_rows - plan.sampled)?;
            logits = Some(self.device.download(cx.stream, &rows, self.logit_hosts.take()?)?);
        }
        let mut logprobs = None;
        if plan.any_logprobs() {
            let rows = self.pass.logprobs(&mut cx, &view)?;
            logprobs = Some(self.device.download(cx.stream, &rows, self.logprob_hosts.take()?)?);
        }
        Ok(Running { plan, upload, results, logits, logprobs })
    }

    /// Waits for a step and reads what it brought for its `chunks`.
    ///
    /// # Errors
    /// The device is lost.
    pub fn finish(&mut self, running: Running<B>, chunks: &[Chunk]) -> Result<StepResults> {
        let Running { plan, upload, results, logits, logprobs } = running;
        let results = results.finish()?;
        let logits = logits.map(InFlight::finish).transpose()?;
        let logprobs = logprobs.map(InFlight::finish).transpose()?;
        let vocab = self.bounds.plan.vocab;
        let downloads = Downloads {
            plan: &plan,
            vocab,
            results: results.bytes(),
            logits: bytes_of(&logits),
            logprobs: bytes_of(&logprobs),
        };
        let chunks = chunks.iter().zip(&plan.sequences);
        let chunks = chunks.map(|(chunk, sequence)| downloads.of(chunk, sequence)).collect();
        self.result_hosts.0.push(results);
        self.logit_hosts.0.extend(logits);
        self.logprob_hosts.0.extend(logprobs);
        self.plan_hosts.0.push(upload.finish()?);
        Ok(StepResults { chunks, vocab })
    }
}

/// What an executor is made of.
pub struct Parts<B: Backend> {
    /// The device.
    pub device: B,
    /// The compute stream, with the workspace of `amphora_model::workspace` for `step_limits`.
    pub stream: B::Stream,
    /// The loaded model.
    pub model: Model<B>,
    /// Bounds of plans and batches.
    pub bounds: Bounds,
    /// Bounds that activations are counted from.
    pub step_limits: StepLimits,
    /// Compute type.
    pub dtype: DType,
}

fn bytes_of<H: HostBytes>(host: &Option<H>) -> &[u8] {
    host.as_ref().map_or(&[], HostBytes::bytes)
}

/// Host buffers of one kind, handed out and taken back.
struct Buffers<B: Backend>(Vec<B::Host>);

impl<B: Backend> Buffers<B> {
    fn new(device: &B, count: usize, bytes: usize) -> Result<Self> {
        (0..count).map(|_| device.reserve_host(bytes)).collect::<Result<_>>().map(Buffers)
    }

    fn take(&mut self) -> Result<B::Host> {
        self.0.pop().ok_or_else(|| Error::invalid("executor", "more steps in flight than buffers"))
    }
}
