//! Inside the golden models: choices of experts exactly, and router logits, routing weights and hidden
//! states within the golden README's tolerances, all runs of a model as one batch.
#![cfg(feature = "cpu")]
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::Arc;

use amphora_backend_cpu::Cpu;
use amphora_hal::ops::{Routing, WriteTokens};
use amphora_hal::{
    Bucket, Carver, Ctx, DType, Detail, Device, DeviceConfig, HostBytes, LogitRows, LoraRow,
    LoraTable, OpKind, PlanArea, PlanBuilder, PlanLayout, PlanLimits, Pool, SequencePlan, Slot,
    Span, StreamRole, Tensor, TokenTable, Tokens,
};
use amphora_model::adapter::{AdapterBase, AdapterFactors, AdapterOptions};
use amphora_model::adapter_image::AdapterImage;
use amphora_model::source::Source;
use amphora_model::{
    Activations, Config, KvCache, KvShape, LoadOptions, Model, ModelFiles, Observer, Point,
    StepInputs, StepLimits, workspace,
};
use amphora_tests::golden::{self, F32_TOLERANCE, Run, worst};
use anyhow::{Context, Result, ensure};

/// What a forward pass showed, by name.
#[derive(Default)]
struct Seen {
    tensors: BTreeMap<Point, Vec<f32>>,
    /// By layer, of those that have experts: the chosen, and their weights.
    routing: BTreeMap<usize, (Vec<i32>, Vec<f32>)>,
}

fn words(cx: &mut Ctx<'_, Cpu>, tensor: &Tensor<Cpu>) -> amphora_hal::Result<Vec<u8>> {
    let host = cx.device.reserve_host(tensor.bytes())?;
    Ok(cx.device.download(cx.stream, tensor, host)?.finish()?.bytes().to_vec())
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|w| f32::from_le_bytes([w[0], w[1], w[2], w[3]])).collect()
}

impl Observer<Cpu> for Seen {
    fn tensor(
        &mut self,
        cx: &mut Ctx<'_, Cpu>,
        point: Point,
        tensor: &Tensor<Cpu>,
    ) -> amphora_hal::Result<()> {
        self.tensors.insert(point, floats(&words(cx, tensor)?));
        Ok(())
    }

    fn routing(
        &mut self,
        cx: &mut Ctx<'_, Cpu>,
        layer: usize,
        routing: &Routing<Cpu>,
    ) -> amphora_hal::Result<()> {
        let experts = words(cx, routing.experts().tensor())?;
        let experts = experts.chunks_exact(4).map(|w| i32::from_le_bytes([w[0], w[1], w[2], w[3]]));
        let weights = floats(&words(cx, routing.weights())?);
        assert!(self.routing.insert(layer, (experts.collect(), weights)).is_none());
        Ok(())
    }
}

/// Brings up the stored prompt of every run as one batch, each with its adapter in a slot of its own, for
/// `body` to run.
fn step<T>(
    model_name: &str,
    runs: &[Run],
    prompts: &[Vec<u32>],
    body: impl FnOnce(&Model<Cpu>, &mut Ctx<'_, Cpu>, StepInputs<'_, Cpu>) -> amphora_hal::Result<T>,
) -> Result<(Config, T)> {
    let device = Cpu::open(&DeviceConfig::default())?;
    let folder = golden::folder();
    let files = ModelFiles::open(&folder.join("models").join(model_name))?;
    let config = Config::read(&files)?;
    let tokens: usize = prompts.iter().map(Vec::len).sum();
    let longest = prompts.iter().map(Vec::len).max().context("no prompts")?;
    let blocks_each = longest.div_ceil(16);
    let plan_limits = PlanLimits {
        sequences: runs.len(),
        tokens,
        blocks_per_sequence: blocks_each,
        block_size: 16,
        kv_blocks: blocks_each * runs.len(),
        vocab: config.vocab,
        positions: longest,
        slots: runs.len(),
        tile_rows: device.caps().tile_rows,
        edits: 0,
    };
    let limits = StepLimits {
        tokens,
        sequences: runs.len(),
        logit_rows: runs.len(),
        context: longest,
        slots: runs.len(),
        max_rank: 64,
        tile_rows: device.caps().tile_rows,
    };
    let mut stream = device.stream(StreamRole::Compute, workspace(&device, &config, &limits))?;
    let mut cx = Ctx { device: &device, stream: &mut stream };
    let options = LoadOptions { dtype: DType::F32, positions: longest };
    let model = Model::load(&files, config.clone(), options, &mut cx, &mut |_| {})?;

    let layout = model.slices().layout().clone();
    let row_bytes = LoraTable::<Cpu>::row_bytes(&layout, runs.len());
    let arena_bytes = 8 << 20;
    let mut adapters = Carver::new(device.reserve(Pool::Adapters, arena_bytes + row_bytes)?);
    let arena = adapters.carve(&[arena_bytes], DType::U8)?;
    let rows = adapters.carve(&[row_bytes / 4], DType::I32)?;
    let table = LoraTable::new(arena, rows, Arc::clone(&layout), runs.len(), DType::F32)?;
    let mut used = 0;
    for (slot, run) in runs.iter().enumerate() {
        let Some(name) = &run.adapter else { continue };
        let source = Source::Folder(folder.join("adapters").join(model_name).join(name));
        let base = AdapterBase::from(&config);
        let factors = AdapterFactors::load(&source, &base, &AdapterOptions::default())?;
        let image = AdapterImage::pack(&device, &factors, model.slices(), DType::F32)?;
        let mut offsets = Vec::new();
        let mut spans = vec![Vec::new(); image.pages.len()];
        for block in &image.blocks {
            spans[block.page].push(Span { from: block.offset, to: used, len: block.bytes });
            offsets.push((used / amphora_hal::ARENA_UNIT) as u32);
            used += block.bytes;
        }
        for (page, spans) in image.pages.into_iter().zip(spans) {
            let sent = table.upload_blocks(&device, cx.stream, page, &spans);
            sent.map_err(|back| back.error)?.finish()?;
        }
        let mut rows = vec![LoraRow::default(); layout.rows()];
        for row in &image.rows {
            let class = row.class.get() as u32;
            let (a, b) = (offsets[row.a], offsets[row.b]);
            rows[row.row] = LoraRow { a, b, class, scale: row.scale };
        }
        let host = device.reserve_host(std::mem::size_of_val(&rows[..]))?;
        let sent = table.write_slot(&device, cx.stream, host, Slot::new(slot as u16), &rows);
        sent.map_err(|back| back.error)?.finish()?;
    }

    let bucket = Bucket { tokens, sequences: runs.len(), logit_rows: runs.len() };
    let mut plan = PlanBuilder::new(&plan_limits, bucket)?;
    for (i, prompt) in prompts.iter().enumerate() {
        let blocks: Vec<u32> = (0..blocks_each).map(|b| (b * runs.len() + i) as u32).collect();
        plan.push(SequencePlan {
            sequence: i,
            slot: runs[i].adapter.is_some().then_some(Slot::new(i as u16)),
            first_position: 0,
            tokens: Tokens::Prompt(prompt),
            blocks: &blocks,
            copy: None,
            sample: None,
            edits: &[],
            logprobs: None,
            logits: LogitRows::None,
        })?;
    }
    let plan_bytes = PlanLayout::new(&plan_limits, bucket)?.bytes();
    let step_bytes = Activations::<Cpu>::bytes(&config, &limits, DType::F32);
    let table_dims = [plan_limits.sequences + plan_limits.tokens];
    let scratch = plan_bytes + step_bytes + amphora_hal::carved_bytes(&table_dims, DType::I32);
    let mut scratch = Carver::new(device.reserve(Pool::Scratch, scratch)?);
    let area = PlanArea::new(scratch.carve(&[plan_bytes], DType::U8)?)?;
    let mut ids = TokenTable::new(scratch.carve(&table_dims, DType::I32)?, &plan_limits)?;
    let mut activations = Activations::carve(&mut scratch, &config, &limits, DType::F32)?;
    let shape = KvShape { blocks: plan_limits.kv_blocks, block_size: 16 };
    let mut kv = KvCache::reserve(&device, &config, shape, DType::F32)?;
    let host = device.reserve_host(plan_bytes)?;
    let uploaded = plan.upload(&device, cx.stream, host, &area);
    let (plan, sent) = uploaded.map_err(|back| back.error)?;
    sent.finish()?;
    WriteTokens { prompt: plan.prompt(), table: &mut ids }.run(&mut cx)?;
    let inputs = StepInputs {
        plan: &plan,
        tokens: &ids,
        kv: &mut kv,
        activations: &mut activations,
        lora: Some(&table),
    };
    let done = body(&model, &mut cx, inputs)?;
    Ok((config, done))
}

/// Runs the batch.
fn forward(model_name: &str, runs: &[Run], prompts: &[Vec<u32>]) -> Result<(Config, Seen)> {
    step(model_name, runs, prompts, |model, cx, inputs| {
        let mut seen = Seen::default();
        model.forward(cx, inputs, &mut seen).map(|_| seen)
    })
}

fn hold(model: &str, runs: Vec<Run>) -> Result<()> {
    let (mut shown, mut stored) = (Vec::new(), Vec::new());
    for run in runs {
        if let Some(inside) = run.inside()? {
            shown.push(run);
            stored.push(inside);
        }
    }
    ensure!(!shown.is_empty(), "{model}: nothing is stored of the inside");
    let runs = shown;
    let prompts: Vec<Vec<u32>> = stored.iter().map(|inside| inside.tokens.clone()).collect();
    let (config, seen) = forward(model, &runs, &prompts)?;

    let mut first = 0;
    for (run, want) in runs.iter().zip(&stored) {
        let name = format!("{model}/{}", run.adapter.as_deref().unwrap_or("base"));
        let rows = first..first + want.tokens.len();
        first = rows.end;
        let part =
            |values: &[f32], width: usize| values[rows.start * width..rows.end * width].to_vec();
        let of = |all: &[f32], layer: usize, width: usize| {
            all[layer * rows.len() * width..][..rows.len() * width].to_vec()
        };
        ensure!(seen.routing.keys().eq(&want.expert_layers), "{name}: other layers have experts");
        for (index, (&layer, (experts, weights))) in seen.routing.iter().enumerate() {
            let k = config.top_k;
            let logits = part(&seen.tensors[&Point::RouterLogits(layer)], config.experts);
            let (off, at) = worst(&logits, &of(&want.logits, index, config.experts));
            ensure!(
                off <= F32_TOLERANCE,
                "{name}: router logit {at} of layer {layer} off by {off}"
            );
            let chosen = &experts[rows.start * k..rows.end * k];
            let expected = &want.experts[index * rows.len() * k..][..rows.len() * k];
            ensure!(chosen == expected, "{name}: layer {layer} chose {chosen:?} for {expected:?}");
            let (off, at) = worst(&part(weights, k), &of(&want.weights, index, k));
            ensure!(off <= 1e-4, "{name}: routing weight {at} of layer {layer} off by {off}");
        }
        let points = std::iter::once(Point::Embedding)
            .chain((0..config.layers()).map(Point::Residual))
            .chain([Point::FinalNorm]);
        for (index, point) in points.enumerate() {
            let got = part(&seen.tensors[&point], config.hidden);
            let want = of(&want.hidden, index, config.hidden);
            for (got, want) in got.chunks(config.hidden).zip(want.chunks(config.hidden)) {
                let most = want.iter().fold(0.0f32, |most, v| most.max(v.abs()));
                let (off, at) = worst(got, want);
                ensure!(off <= 1e-3 * most, "{name}: element {at} at {point:?} is off by {off}");
            }
        }
    }
    Ok(())
}

#[test]
fn the_inside_of_each_model_is_as_stored() {
    for model in golden::MODELS {
        let runs = Run::all(model).unwrap();
        assert!(runs.len() > 1, "{model}: the base and adapters");
        hold(model, runs).unwrap();
    }
}

/// Fails behind the first layer's residual, which the second has begun with.
struct FailsInLayer;

impl Observer<Cpu> for FailsInLayer {
    fn tensor(
        &mut self,
        _: &mut Ctx<'_, Cpu>,
        point: Point,
        _: &Tensor<Cpu>,
    ) -> amphora_hal::Result<()> {
        match point {
            Point::Residual(0) => Err(amphora_hal::Error::invalid("observe", "half-way")),
            _ => Ok(()),
        }
    }
}

/// What a step that failed within a layer leaves open would take the next one's operators in.
#[test]
fn a_layer_that_fails_ends_before_the_next_step() {
    let runs: Vec<Run> = Run::all("llama").unwrap().into_iter().take(1).collect();
    let tell = |model: &Model<Cpu>, cx: &mut Ctx<'_, Cpu>, inputs: StepInputs<'_, Cpu>| {
        let StepInputs { plan, tokens, kv, activations, lora } = inputs;
        let device = cx.device;
        device.profile(cx.stream, Detail::Parts, |stream| {
            let mut cx = Ctx { device, stream };
            let first =
                StepInputs { plan, tokens, kv: &mut *kv, activations: &mut *activations, lora };
            model.forward(&mut cx, first, &mut FailsInLayer).expect_err("it was told to");
            model.forward(&mut cx, StepInputs { plan, tokens, kv, activations, lora }, &mut ())?;
            Ok(())
        })
    };
    let (_, profile) = step("llama", &runs, &[vec![1, 2, 3]], tell).unwrap();
    let embeds: Vec<_> = profile.parts.iter().filter(|part| part.op == OpKind::Embed).collect();
    assert_eq!(embeds.iter().map(|part| part.layer).collect::<Vec<_>>(), [None, None]);
    assert!(profile.parts.iter().any(|part| part.layer == Some(1)), "layers are told");
}
