//! Cases of `lora_linear`: slices, ranks and adapters of all kinds in one batch.

use amphora_hal::ops::{Linear, LoraLinear};
use amphora_hal::{Backend, Caps, DType, OpBounds, OpKey, OpKind, Result, Scheme, SliceMeta};
use std::sync::Arc;

use super::linear::{HostLinear, LinearSpec};
use crate::compare::{Tolerance, tolerance};
use crate::fixtures::{Adapters, Place, deltas, lora_slices};
use crate::harness::{ByRow, Case, Expect, HostOp, Launch, case};
use crate::host::HostTensor;
use crate::oracle::lora_linear::lora_linear;
use crate::rig::Rig;
use crate::rng::Rng;
use crate::step::{Step, limits, rows_bucket};

/// How the outputs are cut into slices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// One slice.
    Whole,
    /// q, k and v, k and v a quarter of q each; outputs must be a multiple of 6.
    Qkv,
    /// Gate in the even outputs, up in the odd ones.
    Interleaved,
}

impl Cut {
    /// The slices of `n` outputs.
    pub fn places(self, n: usize) -> Vec<(Place, usize)> {
        let place = |slice, offset, stride| Place { slice, offset, stride };
        match self {
            Cut::Whole => vec![(place(0, 0, 1), n)],
            Cut::Qkv => {
                let kv = n / 6;
                vec![
                    (place(0, 0, 1), n - 2 * kv),
                    (place(1, n - 2 * kv, 1), kv),
                    (place(2, n - kv, 1), kv),
                ]
            }
            Cut::Interleaved => vec![(place(0, 0, 2), n / 2), (place(1, 1, 2), n / 2)],
        }
    }
}

/// Which slices each adapter touches, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Touch {
    /// Each slice with factors of its own.
    All,
    /// All slices with one A: a fused file.
    SharedA,
    /// Slice i only in slots with slot % slices = i: one-sided adapters.
    OneSided,
    /// Each slice of each slot at a rank of its own, up to the given one.
    MixedRanks,
    /// Slot i of n at (i + 1) / n of the given rank: as many slots as the rank says have every rank there is.
    RankBySlot,
}

/// Which adapter each row uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rows {
    /// Any or none.
    Random,
    /// None.
    Base,
    /// All the same.
    One,
    /// One slot after another, so that neighbours always differ.
    Alternating,
}

/// Sizes and variants of a call.
#[derive(Debug, Clone, Copy)]
pub struct LoraLinearSpec {
    /// The base product.
    pub base: LinearSpec,
    /// Rows of the bucket beyond the tokens.
    pub padding: usize,
    /// Rank.
    pub rank: usize,
    /// Adapters.
    pub slots: usize,
    /// Slices.
    pub cut: Cut,
    /// Touched slices.
    pub touch: Touch,
    /// Adapters of the rows.
    pub rows: Rows,
}

impl LoraLinearSpec {
    /// Random rows over adapters that touch one slice.
    pub fn new(base: LinearSpec, rank: usize, slots: usize) -> Self {
        LoraLinearSpec {
            base,
            padding: 0,
            rank,
            slots,
            cut: Cut::Whole,
            touch: Touch::All,
            rows: Rows::Random,
        }
    }

    /// What a case of it is called.
    pub fn name(&self) -> String {
        let LinearSpec { tokens, k, n, dtype, .. } = self.base;
        let (rank, slots) = (self.rank, self.slots);
        let mut name = format!("lora_linear/{dtype}/t={tokens},r={rank},slots={slots},k={k},n={n}");
        if self.cut != Cut::Whole {
            name += &format!(",{:?}", self.cut);
        }
        if self.touch != Touch::All {
            name += &format!(",{:?}", self.touch);
        }
        if self.rows != Rows::Random {
            name += &format!(",{:?}", self.rows);
        }
        if self.padding > 0 {
            name += &format!(",padding={}", self.padding);
        }
        if self.base.gap > 0 {
            name += ",strided";
        }
        if self.base.out != dtype {
            name += ",out=f32";
        }
        name.to_lowercase()
    }
}

/// One call.
#[derive(Debug, Clone)]
pub struct HostLoraLinear {
    /// The base product.
    pub base: HostLinear,
    /// All adapters of the table.
    pub adapters: Adapters,
    /// Where the slices go.
    pub places: Vec<Place>,
    /// Steps of one bucket, which differ in their rows' adapters.
    pub steps: Vec<Step>,
}

impl HostLoraLinear {
    /// Random operands.
    pub fn random(rng: &mut Rng, caps: &Caps, spec: LoraLinearSpec) -> Self {
        let LoraLinearSpec { base, slots, rank, .. } = spec;
        let bucket = base.tokens + spec.padding;
        let host = HostLinear::random(rng, caps, LinearSpec { tokens: bucket, ..base });
        let (places, sizes): (Vec<Place>, Vec<usize>) = spec.cut.places(base.n).into_iter().unzip();
        let metas: Vec<SliceMeta> =
            sizes.iter().map(|&n| SliceMeta { k: base.k, n, experts: 1 }).collect();
        let mut adapters = Adapters::none(base.dtype, slots, &metas);
        for slot in 0..slots {
            let shared =
                Arc::new(rng.normals(rank * base.k, 1.0 / (base.k as f64).sqrt(), base.dtype));
            for slice in 0..metas.len() {
                match spec.touch {
                    Touch::All => adapters.add(rng, (slot, slice, 0), rank),
                    Touch::SharedA => {
                        adapters.add_with(rng, (slot, slice, 0), rank, shared.clone());
                    }
                    Touch::OneSided if slot % metas.len() != slice => {}
                    Touch::OneSided => adapters.add(rng, (slot, slice, 0), rank),
                    Touch::MixedRanks => {
                        let rank = 1 + rng.below(rank);
                        adapters.add(rng, (slot, slice, 0), rank);
                    }
                    Touch::RankBySlot => {
                        adapters.add(rng, (slot, slice, 0), (slot + 1) * rank / slots);
                    }
                }
            }
        }
        let plan = limits(rows_bucket(bucket), slots, caps.tile_rows);
        let mut step = |tokens: usize| {
            let any = |rng: &mut Rng| rng.below(slots + 1).checked_sub(1);
            let of = |i: usize| match spec.rows {
                Rows::Random => any(rng),
                Rows::Base => None,
                Rows::One => Some(slots - 1),
                Rows::Alternating => Some(i % slots),
            };
            let rows: Vec<_> = (0..tokens).map(of).collect();
            Step::of_rows(&rows, bucket, plan)
        };
        let steps = vec![step(base.tokens), step(base.tokens.div_ceil(2))];
        HostLoraLinear { base: host, adapters, places, steps }
    }

    /// The same call with every row's adapter as given.
    pub fn with_slots(&self, slots: &[Option<usize>]) -> Self {
        let step = Step::of_rows(slots, self.steps[0].bucket.tokens, self.steps[0].limits);
        HostLoraLinear { steps: vec![step], ..self.clone() }
    }

    /// The same call with other adapters in the table.
    pub fn with_adapters(&self, adapters: Adapters) -> Self {
        HostLoraLinear { adapters, ..self.clone() }
    }
}

impl HostOp for HostLoraLinear {
    fn keys(&self) -> Vec<OpKey> {
        let dtype = self.base.spec.dtype;
        vec![OpKey::new(OpKind::LoraLinear, dtype).scheme(Scheme::Dense(dtype))]
    }

    fn bounds(&self) -> Vec<OpBounds> {
        let LinearSpec { k, n, .. } = self.base.spec;
        let tokens = self.steps[0].bucket.tokens;
        let rank = self.adapters.max_rank();
        let op = Some(OpKind::LoraLinear);
        vec![OpBounds { op, tokens, k, n, rank, ..OpBounds::default() }]
    }

    fn steps(&self) -> &[Step] {
        &self.steps
    }

    fn bytes(&self) -> usize {
        self.base.size() + self.adapters.block_bytes()
    }

    fn tolerance(&self) -> Tolerance {
        let exact_out = tolerance(OpKind::LoraLinear, self.base.spec.out);
        let operands = tolerance(OpKind::LoraLinear, self.base.spec.dtype);
        Tolerance { of_scale: operands.of_scale, nmse: operands.nmse, ..exact_out }
    }

    fn place<B: Backend>(&self, rig: &mut Rig<B>) -> Result<Launch<B>> {
        let LinearSpec { tokens, k, n, gap, out, .. } = self.base.spec;
        let x = rig.tensor("x", &self.base.x)?.narrow(1, 0, k)?;
        let weight = rig.weight("weight", &self.base.weight)?;
        let bias = match &self.base.bias {
            Some(bias) => Some(rig.tensor("bias", &HostTensor::real(&[n], DType::F32, bias))?),
            None => None,
        };
        let lora = rig.lora(&self.adapters)?;
        let slices = lora_slices(&self.adapters, &self.places);
        let mut out = rig.poisoned("out", &[tokens, n + gap], out)?.narrow(1, gap, n)?;
        Ok(Box::new(move |cx, plan| {
            let base = Linear { x: &x, weight: &weight, bias: bias.as_ref(), out: &mut out };
            LoraLinear { base, lora: &lora, slices: &slices, segments: plan.segments() }.run(cx)
        }))
    }

    fn expect(&self, step: usize) -> Vec<(&'static str, Expect)> {
        let out = lora_linear(
            &self.base.inputs(),
            self.base.matrix(),
            self.base.bias.as_deref(),
            &self.steps[step].slots(),
            &deltas(&self.adapters, &self.places),
        );
        vec![("out", self.base.wants(&out))]
    }
}

impl ByRow for HostLoraLinear {
    const OUTPUTS: &'static [&'static str] = &["out"];

    fn rows(&self) -> usize {
        self.steps[0].rows()
    }

    fn of_rows(&self, rows: &[usize]) -> Self {
        let steps = vec![self.steps[0].of_single_rows(rows)];
        HostLoraLinear { base: self.base.of_rows(rows), steps, ..self.clone() }
    }
}

fn specs(dtype: DType) -> Vec<LoraLinearSpec> {
    let base = |tokens, k, n| LinearSpec::new(tokens, k, n, dtype);
    let new = LoraLinearSpec::new;
    let mut specs = vec![
        new(base(1, 8, 8), 1, 1),
        LoraLinearSpec { rows: Rows::One, ..new(base(1, 64, 48), 8, 1) },
        LoraLinearSpec { rows: Rows::Base, ..new(base(5, 64, 48), 8, 3) },
        LoraLinearSpec { rows: Rows::One, ..new(base(33, 64, 40), 8, 3) },
        LoraLinearSpec { rows: Rows::Alternating, ..new(base(19, 64, 48), 16, 7) },
        LoraLinearSpec { padding: 1, ..new(base(7, 48, 70), 12, 3) },
        LoraLinearSpec { padding: 11, ..new(base(5, 33, 17), 3, 2) },
        LoraLinearSpec { padding: 3, ..new(base(0, 64, 48), 12, 3) },
        LoraLinearSpec { padding: 90, ..new(base(0, 512, 64), 12, 3) },
        LoraLinearSpec { cut: Cut::Qkv, ..new(base(7, 64, 96), 12, 3) },
        LoraLinearSpec { cut: Cut::Qkv, touch: Touch::OneSided, ..new(base(9, 64, 96), 4, 3) },
        LoraLinearSpec { cut: Cut::Qkv, touch: Touch::MixedRanks, ..new(base(21, 80, 60), 64, 5) },
        LoraLinearSpec { cut: Cut::Qkv, touch: Touch::SharedA, ..new(base(6, 64, 96), 8, 2) },
        LoraLinearSpec { cut: Cut::Interleaved, ..new(base(7, 40, 50), 5, 3) },
        LoraLinearSpec {
            cut: Cut::Interleaved,
            touch: Touch::SharedA,
            ..new(base(8, 40, 50), 9, 3)
        },
        LoraLinearSpec {
            cut: Cut::Interleaved,
            touch: Touch::OneSided,
            ..new(base(8, 40, 50), 9, 4)
        },
        LoraLinearSpec {
            cut: Cut::Qkv,
            touch: Touch::MixedRanks,
            padding: 3,
            ..new(base(70, 72, 48), 40, 9)
        },
        // A rank above both sides of the projection.
        LoraLinearSpec { rows: Rows::One, ..new(base(3, 16, 8), 64, 1) },
        new(LinearSpec { bias: true, gap: 8, ..base(13, 64, 33) }, 16, 3),
        new(LinearSpec { out: DType::F32, bias: true, ..base(9, 64, 8) }, 4, 3),
        new(base(130, 64, 64), 16, 2),
        LoraLinearSpec {
            cut: Cut::Qkv,
            touch: Touch::MixedRanks,
            padding: 3,
            ..new(LinearSpec { bias: true, ..base(140, 72, 132) }, 70, 9)
        },
        LoraLinearSpec {
            cut: Cut::Qkv,
            touch: Touch::MixedRanks,
            padding: 5,
            ..new(LinearSpec { bias: true, ..base(195, 6144, 1032) }, 40, 5)
        },
        // Every rank that an adapter may have, in one batch; and some at odd steps where kernels are for few rows.
        LoraLinearSpec {
            rows: Rows::Alternating,
            touch: Touch::RankBySlot,
            ..new(base(256, 40, 24), 256, 256)
        },
        LoraLinearSpec {
            rows: Rows::Alternating,
            touch: Touch::RankBySlot,
            ..new(base(43, 128, 64), 256, 43)
        },
        // One slice of low ranks behind sums of a library.
        LoraLinearSpec {
            padding: 2,
            ..new(LinearSpec { bias: true, ..base(70, 2048, 1032) }, 20, 5)
        },
        // Tiles of segments for more blocks than a device runs at once.
        LoraLinearSpec {
            cut: Cut::Qkv,
            touch: Touch::MixedRanks,
            padding: 1,
            ..new(base(1500, 72, 24), 40, 5)
        },
    ];
    specs.extend(
        [1, 7, 8, 9, 16, 17, 32, 33, 48, 65, 129, 256].map(|rank| new(base(4, 40, 24), rank, 2)),
    );
    specs
}

/// All cases.
pub fn cases<B: Backend>(caps: &Caps) -> Vec<Case<B>> {
    let specs = caps.dtypes.iter().flat_map(|&dtype| specs(dtype));
    let make = |spec: LoraLinearSpec| {
        case(spec.name(), move |rng, caps| HostLoraLinear::random(rng, caps, spec))
    };
    specs.map(make).collect()
}
