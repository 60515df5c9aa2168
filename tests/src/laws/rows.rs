//! A row does not depend on its batch: alone, among others, in another order.

use amphora_hal::ops::{Activation, Combine, Mask, RopePairing, RouteScore, WeightOn};
use amphora_hal::{Backend, Caps, DType};

use super::{Outcome, RowLaw, near, wrong};
use crate::cases::fused_moe::{HostMoe, MoeSpec, Spread, Touch as MoeTouch};
use crate::cases::linear::{HostLinear, LinearSpec};
use crate::cases::lora_linear::{Cut, HostLoraLinear, LoraLinearSpec, Touch};
use crate::cases::moe_route::{HostMoeRoute, Logits, RouteSpec};
use crate::cases::paged_attention::{AttentionSpec, HostAttention};
use crate::cases::rms_norm::{HostRmsNorm, Kind as NormKind};
use crate::cases::rope::{HostRope, RopeSpec};
use crate::cases::sample::{HostSample, Kind as SampleKind, SampleSpec};
use crate::cases::swiglu::{CLAMPED, HostSwiglu, Place, SwigluSpec};
use crate::harness::{ByRow, Case, outputs};
use crate::rng::Rng;

/// Batches of a law's run, at random sizes up to this.
const BATCHES: usize = 5;
const MOST_ROWS: usize = 70;
/// Rows of a batch that are computed alone.
const ALONE: usize = 6;

/// Holds random batches of `make` (given a number of rows and a type) against some of their rows
/// alone, and against all of them in another order.
fn batches<B: Backend, H: ByRow>(
    name: &str,
    law: RowLaw,
    make: impl Fn(&mut Rng, &Caps, usize, DType) -> H + 'static,
) -> Case<B> {
    let purpose = name.to_owned();
    let run = move |device: &B, seed: u64| {
        let mut rng = Rng::new(seed, &purpose);
        for &dtype in device.caps().dtypes {
            for _ in 0..BATCHES {
                let rows = 1 + rng.below(MOST_ROWS);
                let op = make(&mut rng, device.caps(), rows, dtype);
                batch(device, &op, law, &mut rng)?;
            }
        }
        Ok(())
    };
    Case { name: format!("laws/rows_alone/{name}"), run: Box::new(run) }
}

fn batch<B: Backend, H: ByRow>(device: &B, op: &H, law: RowLaw, rng: &mut Rng) -> Outcome {
    let rows = op.rows();
    if rows == 0 {
        return Ok(());
    }
    let whole = outputs(device, op, 0)?;
    let mut parts: Vec<Vec<usize>> = (0..ALONE).map(|_| vec![rng.below(rows)]).collect();
    parts.push(rng.permutation(rows));
    parts.push(rng.permutation(rows).into_iter().take(rows.div_ceil(2)).collect());
    for part in parts {
        let alone = outputs(device, &op.of_rows(&part), 0)?;
        for (name, tensor) in whole.iter().filter(|(name, _)| H::OUTPUTS.contains(&name.as_str())) {
            let Some((_, got)) = alone.iter().find(|(of, _)| of == name) else {
                return wrong(format!("{name} is not placed for fewer rows"));
            };
            let got = got.of_rows(&(0..part.len()).collect::<Vec<_>>());
            let want = tensor.of_rows(&part);
            let what = format!("rows {part:?} of {rows}, {name}");
            match law {
                RowLaw::Bitwise if got != want => {
                    let differs = |&i: &usize| got.row(i) != want.row(i);
                    let row = (0..part.len()).find(differs).map(|i| part[i]);
                    return wrong(format!("{what}: row {row:?} has other bits"));
                }
                RowLaw::Bitwise => {}
                // Neither is what is right: each lies within the tolerance of it.
                RowLaw::Near => near(&what, &got, &want, op.tolerance().between_two())?,
            }
        }
    }
    Ok(())
}

fn attention(rng: &mut Rng, caps: &Caps, rows: usize, dtype: DType) -> HostAttention {
    let mut left = rows;
    let mut sequences = Vec::new();
    while left > 0 {
        let of = if rng.below(2) == 0 { 1 } else { 1 + rng.below(left) };
        sequences.push((rng.below(60), of));
        left -= of;
    }
    let (heads, kv_heads) = rng.pick(&[(4, 2), (3, 3), (8, 1)]);
    let dim = rng.pick(&[16, 64, 80]);
    let spec = AttentionSpec {
        sequences,
        padding: rng.below(4),
        heads,
        kv_heads,
        k_dim: dim,
        v_dim: dim,
        block_size: 16,
        mask: rng.pick(&[Mask::Causal, Mask::Window(20), Mask::Chunk(24)]),
        sinks: rng.below(2) == 0,
        dtype,
    };
    HostAttention::random(rng, caps, spec)
}

fn moe(rng: &mut Rng, rows: usize, dtype: DType) -> MoeSpec {
    MoeSpec {
        padding: rng.below(4),
        clamped: rng.below(2) == 0,
        biases: rng.below(2) == 0,
        weight_on: rng.pick(&[WeightOn::Input, WeightOn::Output]),
        combine: rng.pick(&[Combine::Add, Combine::Replace]),
        spread: rng.pick(&[Spread::Random, Spread::Same]),
        ..MoeSpec::new(rows, 8, 2, dtype)
    }
}

/// Every operator that computes.
pub(super) fn laws<B: Backend>(law: RowLaw) -> Vec<Case<B>> {
    vec![
        batches("rms_norm", law, |rng, caps, rows, dtype| {
            let width = rng.pick(&[72, 128, 256, 300]);
            HostRmsNorm::random(rng, caps, NormKind::Residual, (rows, width, dtype))
        }),
        batches("swiglu", law, |rng, caps, rows, dtype| {
            let inner = (1 + rng.below(300)) * rng.pick(&[1, 8]);
            let activation = rng.pick(&[Activation::Swiglu, CLAMPED]);
            let spec = SwigluSpec { rows, inner, dtype, activation, place: Place::Columns };
            HostSwiglu::random(rng, caps, spec)
        }),
        batches("linear", law, |rng, caps, rows, dtype| {
            let (k, n) = (1 + rng.below(100), 1 + rng.below(100));
            HostLinear::random(
                rng,
                caps,
                LinearSpec { bias: true, ..LinearSpec::new(rows, k, n, dtype) },
            )
        }),
        batches("lora_linear", law, |rng, caps, rows, dtype| {
            let base = LinearSpec::new(rows, 1 + rng.below(100), 6 * (1 + rng.below(12)), dtype);
            let (cut, touch) = rng.pick(&[
                (Cut::Qkv, Touch::MixedRanks),
                (Cut::Interleaved, Touch::SharedA),
                (Cut::Whole, Touch::All),
                (Cut::Qkv, Touch::OneSided),
            ]);
            let (padding, rank) = (rng.below(4), 1 + rng.below(40));
            let spec = LoraLinearSpec { cut, touch, padding, ..LoraLinearSpec::new(base, rank, 4) };
            HostLoraLinear::random(rng, caps, spec)
        }),
        batches("rope", law, |rng, caps, _, dtype| {
            let spec = RopeSpec {
                rows: &[(60, 1), (0, 5), (17, 1), (3, 9), (1, 20)],
                bucket: 40,
                heads: 4,
                kv_heads: 2,
                dim: 80,
                rotary: 64,
                pairing: rng.pick(&[RopePairing::Half, RopePairing::Interleaved]),
                q_scale: true,
                stored: false,
                dtype,
            };
            HostRope::random(rng, caps, spec)
        }),
        batches("paged_attention", law, attention),
        batches("moe_route", law, |rng, caps, rows, _| {
            let spec = RouteSpec {
                tokens: rows,
                padding: rng.below(4),
                spare: 0,
                experts: 16,
                top_k: 4,
                slots: 3,
                score: rng.pick(&[
                    RouteScore::SoftmaxTopk,
                    RouteScore::Softmax,
                    RouteScore::Sigmoid,
                ]),
                correction: false,
                groups: None,
                renorm: rng.below(2) == 0,
                scale: 1.5,
                logits: Logits::Random,
            };
            HostMoeRoute::random(rng, caps, spec)
        }),
        batches("fused_moe", law, |rng, caps, rows, dtype| {
            let spec = moe(rng, rows, dtype);
            HostMoe::random(rng, caps, spec)
        }),
        batches("fused_moe_lora", law, |rng, caps, rows, dtype| {
            let touch = rng.pick(&[MoeTouch::All, MoeTouch::Ragged, MoeTouch::SharedA]);
            let spec = moe(rng, rows, dtype).lora(3, 1 + rng.below(20), touch);
            HostMoe::random(rng, caps, spec)
        }),
        batches("sample", law, |rng, _, rows, _| {
            let vocab = 1 + rng.below(300);
            HostSample::random(
                rng,
                SampleSpec { kind: SampleKind::Mixed, sequences: rows, padding: 2, vocab },
            )
        }),
    ]
}
