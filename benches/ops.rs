//! The operators that a step's time goes to, at shapes of serving, on the conformance suite's own
//! case types. Each line of criterion's is followed by the share of the nearer roof.

use std::time::{Duration, Instant};

use amphora_backend_cpu::Cpu;
use amphora_benches::{Costed, Roof};
use amphora_hal::ops::Mask;
use amphora_hal::{Backend, Ctx, DType, DeviceConfig, Result};
use amphora_tests::cases::fused_moe::{HostMoe, MoeSpec, Touch as MoeTouch};
use amphora_tests::cases::linear::{HostLinear, LinearSpec};
use amphora_tests::cases::lora_linear::{Cut, HostLoraLinear, LoraLinearSpec, Touch};
use amphora_tests::cases::paged_attention::{AttentionSpec, HostAttention};
use amphora_tests::cases::sample::{HostSample, Kind as SampleKind, SampleSpec};
use amphora_tests::rig::Rig;
use amphora_tests::rng::Rng;
use criterion::{Criterion, Throughput};

/// Rows of a step: one answer alone, a small batch, a chunk of a prompt.
const ROWS: [usize; 3] = [1, 8, 64];

/// Runs `op` as often as criterion asks, and prints the best time's share of the roof.
fn bench<B: Backend>(
    criterion: &mut Criterion,
    (device, roof): (&B, Roof),
    name: &str,
    op: &impl Costed,
) -> Result<()> {
    let cost = op.cost();
    let mut rig = Rig::new(device, op.bytes(), &op.bounds())?;
    let mut launch = op.place(&mut rig)?;
    rig.reset()?;
    let view = rig.plan(&op.steps()[0])?;
    let mut best = Duration::MAX;
    let mut failed = Ok(());
    let mut times = |count: u64| -> Result<Duration> {
        let begin = Instant::now();
        for _ in 0..count {
            launch(&mut Ctx { device, stream: rig.stream() }, &view)?;
        }
        let event = device.record(rig.stream())?;
        device.block_on(&event)?;
        Ok(begin.elapsed())
    };
    let mut group = criterion.benchmark_group("ops");
    group.throughput(Throughput::Bytes(cost.bytes as u64));
    group.bench_function(name, |bencher| {
        bencher.iter_custom(|count| match times(count) {
            Ok(time) => {
                best = best.min(time / u32::try_from(count).unwrap_or(u32::MAX));
                time
            }
            Err(error) => {
                failed = Err(error);
                // Criterion divides by the time.
                Duration::from_nanos(1)
            }
        });
    });
    group.finish();
    failed?;
    if best < Duration::MAX {
        let (limit, share) = roof.share(cost, best);
        println!("{name}: best {best:?}, {:.0} % of the {limit} roof\n", 100.0 * share);
    }
    Ok(())
}

fn all<B: Backend>(criterion: &mut Criterion, device: &B) -> Result<()> {
    let roof = Roof::host();
    println!("roofs: {:.1} GB/s read, {:.0} GFLOP/s f32\n", roof.bytes / 1e9, roof.flops / 1e9);
    let caps = device.caps();
    let mut rng = Rng::new(1, "bench");
    for &dtype in caps.dtypes {
        for rows in ROWS {
            let base = LinearSpec::new(rows, 1024, 1536, dtype);
            let op = HostLinear::random(&mut rng, caps, base);
            bench(criterion, (device, roof), &format!("linear/{dtype}/t={rows}"), &op)?;
            let spec = LoraLinearSpec {
                cut: Cut::Qkv,
                touch: Touch::All,
                ..LoraLinearSpec::new(base, 16, 6)
            };
            let op = HostLoraLinear::random(&mut rng, caps, spec);
            bench(
                criterion,
                (device, roof),
                &format!("lora_linear/{dtype}/t={rows},r=16,slots=6"),
                &op,
            )?;
        }
        moe(criterion, (device, roof), &mut rng, dtype)?;
        attention(criterion, (device, roof), &mut rng, dtype)?;
    }
    sample(criterion, (device, roof), &mut rng)
}

fn moe<B: Backend>(
    criterion: &mut Criterion,
    (device, roof): (&B, Roof),
    rng: &mut Rng,
    dtype: DType,
) -> Result<()> {
    for rows in ROWS {
        let base = MoeSpec { hidden: 512, inner: 512, ..MoeSpec::new(rows, 16, 4, dtype) };
        for (name, spec) in
            [("fused_moe", base), ("fused_moe_lora", base.lora(6, 8, MoeTouch::SharedA))]
        {
            let op = HostMoe::random(rng, device.caps(), spec);
            bench(criterion, (device, roof), &format!("{name}/{dtype}/t={rows},e=16,k=4"), &op)?;
        }
    }
    Ok(())
}

fn attention<B: Backend>(
    criterion: &mut Criterion,
    (device, roof): (&B, Roof),
    rng: &mut Rng,
    dtype: DType,
) -> Result<()> {
    for (name, sequences) in
        [("decode,s=8,context=512", vec![(511, 1); 8]), ("prompt,t=64", vec![(0, 64)])]
    {
        let spec = AttentionSpec {
            sequences,
            padding: 0,
            heads: 16,
            kv_heads: 4,
            k_dim: 64,
            v_dim: 64,
            block_size: 16,
            mask: Mask::Causal,
            sinks: true,
            dtype,
        };
        let op = HostAttention::random(rng, device.caps(), spec);
        bench(criterion, (device, roof), &format!("paged_attention/{dtype}/{name}"), &op)?;
    }
    Ok(())
}

/// Draws from a vocabulary of today's size: greedy reads each logit once, the others as they must.
fn sample<B: Backend>(
    criterion: &mut Criterion,
    (device, roof): (&B, Roof),
    rng: &mut Rng,
) -> Result<()> {
    for kind in [
        SampleKind::Greedy,
        SampleKind::Edits,
        SampleKind::TopK,
        SampleKind::TopP,
        SampleKind::Temperature,
    ] {
        let spec = SampleSpec { kind, sequences: 8, padding: 0, vocab: 201_088 };
        let op = HostSample::random(rng, spec);
        let name = format!("sample/f32/{kind:?},s=8,v=201088").to_lowercase();
        bench(criterion, (device, roof), &name, &op)?;
    }
    Ok(())
}

fn main() -> Result<()> {
    let device = <Cpu as amphora_hal::Device>::open(&DeviceConfig::default())?;
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(600))
        .configure_from_args();
    all(&mut criterion, &device)?;
    criterion.final_summary();
    Ok(())
}
