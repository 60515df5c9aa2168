//! Models without files choose experts as they were asked to: evenly, by Zipf's law, all alike.
#![cfg(feature = "cpu")]
#![allow(clippy::unwrap_used)]

use amphora_backend_cpu::Cpu;
use amphora_hal::ops::{Routing, WriteTokens};
use amphora_hal::{
    Bucket, Carver, Ctx, DType, Device, DeviceConfig, HostBytes, LogitRows, PlanArea, PlanBuilder,
    PlanLayout, PlanLimits, Pool, SequencePlan, StreamRole, TokenTable, Tokens, carved_bytes,
};
use amphora_model::synthetic::Spread;
use amphora_model::{
    Activations, Config, KvCache, KvShape, LoadOptions, Model, ModelFiles, Observer, StepInputs,
    StepLimits, workspace,
};
use amphora_tests::rng::Rng;

const TOKENS: usize = 512;

/// The chosen experts of each layer, `[tokens, top_k]`.
#[derive(Default)]
struct Chosen(Vec<Vec<usize>>);

impl Observer<Cpu> for Chosen {
    fn routing(
        &mut self,
        cx: &mut Ctx<'_, Cpu>,
        _layer: usize,
        routing: &Routing<Cpu>,
    ) -> amphora_hal::Result<()> {
        let experts = routing.experts().tensor();
        let host = cx.device.reserve_host(experts.bytes())?;
        let host = cx.device.download(cx.stream, experts, host)?.finish()?;
        let words = host.bytes().chunks_exact(4);
        self.0.push(words.map(|w| i32::from_le_bytes([w[0], w[1], w[2], w[3]]) as usize).collect());
        Ok(())
    }
}

/// Runs one prompt of random tokens.
fn forward(shape: &str, spread: Spread) -> (Config, Chosen) {
    let device = Cpu::open(&DeviceConfig::default()).unwrap();
    let files = ModelFiles::synthetic(shape, spread).unwrap();
    let config = Config::read(&files).unwrap();
    let (blocks, tile_rows) = (TOKENS / 16, device.caps().tile_rows);
    let plan_limits = PlanLimits {
        sequences: 1,
        tokens: TOKENS,
        blocks_per_sequence: blocks,
        block_size: 16,
        kv_blocks: blocks,
        vocab: config.vocab,
        positions: TOKENS,
        slots: 0,
        tile_rows,
        edits: 0,
    };
    let limits = StepLimits {
        tokens: TOKENS,
        sequences: 1,
        logit_rows: 1,
        context: TOKENS,
        slots: 0,
        max_rank: 0,
        tile_rows,
    };
    let bytes = workspace(&device, &config, &limits);
    let mut stream = device.stream(StreamRole::Compute, bytes).unwrap();
    let mut cx = Ctx { device: &device, stream: &mut stream };
    let options = LoadOptions { dtype: DType::F32, positions: TOKENS };
    let model = Model::load(&files, config.clone(), options, &mut cx, &mut |_| {}).unwrap();

    let bucket = Bucket { tokens: TOKENS, sequences: 1, logit_rows: 1 };
    let mut plan = PlanBuilder::new(&plan_limits, bucket).unwrap();
    let mut rng = Rng::new(3, "spread");
    let prompt: Vec<u32> = (0..TOKENS).map(|_| rng.below(config.vocab) as u32).collect();
    plan.push(SequencePlan {
        sequence: 0,
        slot: None,
        first_position: 0,
        tokens: Tokens::Prompt(&prompt),
        blocks: &(0..blocks as u32).collect::<Vec<_>>(),
        copy: None,
        sample: None,
        edits: &[],
        logprobs: None,
        logits: LogitRows::None,
    })
    .unwrap();
    let plan_bytes = PlanLayout::new(&plan_limits, bucket).unwrap().bytes();
    let table_dims = [1 + TOKENS];
    let scratch = Activations::<Cpu>::bytes(&config, &limits, DType::F32)
        + carved_bytes(&[plan_bytes], DType::U8)
        + carved_bytes(&table_dims, DType::I32);
    let mut scratch = Carver::new(device.reserve(Pool::Scratch, scratch).unwrap());
    let area = PlanArea::new(scratch.carve(&[plan_bytes], DType::U8).unwrap()).unwrap();
    let ids = scratch.carve(&table_dims, DType::I32).unwrap();
    let mut ids = TokenTable::new(ids, &plan_limits).unwrap();
    let mut activations = Activations::carve(&mut scratch, &config, &limits, DType::F32).unwrap();
    let shape = KvShape { blocks, block_size: 16 };
    let mut kv = KvCache::reserve(&device, &config, shape, DType::F32).unwrap();
    let host = device.reserve_host(plan_bytes).unwrap();
    let (plan, sent) = plan.upload(&device, cx.stream, host, &area).map_err(|b| b.error).unwrap();
    sent.finish().unwrap();
    WriteTokens { prompt: plan.prompt(), table: &mut ids }.run(&mut cx).unwrap();
    let inputs = StepInputs {
        plan: &plan,
        tokens: &ids,
        kv: &mut kv,
        activations: &mut activations,
        lora: None,
    };
    let mut chosen = Chosen::default();
    model.forward(&mut cx, inputs, &mut chosen).unwrap();
    (config, chosen)
}

/// Shares of the (token, choice) pairs that experts get in a layer, largest first.
fn shares(config: &Config, chosen: &[usize]) -> Vec<f64> {
    let mut counts = vec![0.0; config.experts];
    chosen.iter().for_each(|&expert| counts[expert] += 1.0 / chosen.len() as f64);
    counts.sort_by(|a: &f64, b| b.total_cmp(a));
    counts
}

/// The shares of Zipf's law with exponent 1.1, none of more than one choice of each token.
fn zipf(config: &Config) -> Vec<f64> {
    let weight = |rank: usize| ((rank + 1) as f64).powf(-1.1);
    let all: f64 = (0..config.experts).map(weight).sum();
    (0..config.experts).map(|rank| (weight(rank) / all).min(1.0 / config.top_k as f64)).collect()
}

#[test]
fn experts_are_chosen_as_the_spread_says() {
    for shape in ["tiny-moe", "tiny-qwen3-moe"] {
        for spread in [Spread::Balanced, Spread::Zipf, Spread::One] {
            let (config, Chosen(layers)) = forward(shape, spread);
            assert_eq!(layers.len(), config.layers());
            let mut first = Vec::new();
            for (layer, chosen) in layers.iter().enumerate() {
                let shares = shares(&config, chosen);
                let told = format!("{shape}, {spread:?}, layer {layer}: {shares:.3?}");
                println!("{told}");
                first.push(chosen[0]);
                let even = 1.0 / config.experts as f64;
                match spread {
                    // 512 tokens: a share strays by a tenth of itself.
                    Spread::Balanced => {
                        assert!(shares.iter().all(|s| (s / even - 1.0).abs() < 0.35), "{told}");
                    }
                    // Drawn without replacement, and by noise that is nearly Gumbel's.
                    Spread::Zipf => {
                        let off = shares.iter().zip(zipf(&config)).map(|(a, b)| (a - b).abs());
                        assert!(off.fold(0.0, f64::max) < 0.07, "{told}");
                    }
                    Spread::One => {
                        let chosen = shares.iter().filter(|share| **share > 0.0).count();
                        assert_eq!(chosen, config.top_k, "{told}");
                    }
                }
            }
            if spread == Spread::One {
                assert_ne!(first[0], first[1], "{shape}: layers choose other experts");
            }
        }
    }
}
