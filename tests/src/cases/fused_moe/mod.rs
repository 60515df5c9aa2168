//! Cases of `fused_moe` and `fused_moe_lora`. The routing they read is made by `moe_route` in front,
//! from logits that make experts busy, idle or overrun.

mod list;

pub use list::{cases, lora_cases};

use std::sync::Arc;

use amphora_hal::ops::{
    Activation, Combine, FusedMoe, FusedMoeLora, MoeRoute, RouteScore, RoutingShape, WeightOn,
};
use amphora_hal::{Backend, Caps, DType, OpBounds, OpKey, OpKind, Result, Scheme, SliceMeta};

use crate::compare::Want;
use crate::fixtures::{Adapters, Form, HostMatrices, Place, deltas, lora_slices};
use crate::harness::{ByRow, Expect, HostOp, Launch};
use crate::host::{HostTensor, round};
use crate::oracle::fused_moe::{Experts, Token};
use crate::oracle::moe_route::Route;
use crate::rig::Rig;
use crate::rng::Rng;
use crate::step::{Step, limits, rows_bucket};

/// Which experts tokens go to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spread {
    /// Any.
    Random,
    /// Every token to the same ones; all others have none.
    Same,
    /// Only the first half.
    Half,
}

/// Which slices and experts each adapter touches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Touch {
    /// No table at all: `fused_moe`.
    NoTable,
    /// Nothing, but a table: class 0 everywhere.
    Nothing,
    /// Gate, up and down of every expert.
    All,
    /// Gate and up with one A: a fused file.
    SharedA,
    /// Down alone.
    DownOnly,
    /// Gate and up alone.
    GateUpOnly,
    /// Up alone in odd slots, gate alone in even ones.
    OneSided,
    /// Any slice of any expert or not, each at a rank of its own.
    Ragged,
    /// Slot i of n at (i + 1) / n of the given rank.
    RankBySlot,
}

/// Sizes and variants of a call.
#[derive(Debug, Clone, Copy)]
pub struct MoeSpec {
    /// Rows.
    pub tokens: usize,
    /// Rows of the bucket beyond them.
    pub padding: usize,
    /// Experts.
    pub experts: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Width outside.
    pub hidden: usize,
    /// Width between, after the activation.
    pub inner: usize,
    /// Compute type.
    pub dtype: DType,
    /// gpt_oss's activation, else swiglu.
    pub clamped: bool,
    /// With biases.
    pub biases: bool,
    /// Where routing weights multiply.
    pub weight_on: WeightOn,
    /// Replace or add.
    pub combine: Combine,
    /// Which experts tokens go to.
    pub spread: Spread,
    /// How the file stores the weights.
    pub form: Form,
    /// Adapters.
    pub slots: usize,
    /// Rank.
    pub rank: usize,
    /// What they touch.
    pub touch: Touch,
}

impl MoeSpec {
    /// gpt_oss's form without adapters.
    pub fn new(tokens: usize, experts: usize, top_k: usize, dtype: DType) -> Self {
        MoeSpec {
            tokens,
            padding: 0,
            experts,
            top_k,
            hidden: 48,
            inner: 24,
            dtype,
            clamped: true,
            biases: true,
            weight_on: WeightOn::Output,
            combine: Combine::Replace,
            spread: Spread::Random,
            form: Form::Rows,
            slots: 0,
            rank: 0,
            touch: Touch::NoTable,
        }
    }

    /// The same with adapters.
    pub fn lora(self, slots: usize, rank: usize, touch: Touch) -> Self {
        MoeSpec { slots, rank, touch, ..self }
    }

    /// What a case of it is called.
    pub fn name(&self) -> String {
        let MoeSpec { tokens, padding, experts, top_k, hidden, inner, dtype, .. } = self;
        let op = if self.touch == Touch::NoTable { "fused_moe" } else { "fused_moe_lora" };
        let mut name =
            format!("{op}/{dtype}/t={tokens}+{padding},e={experts},k={top_k},h={hidden},i={inner}");
        if self.touch != Touch::NoTable {
            name += &format!(",r={},slots={},{:?}", self.rank, self.slots, self.touch);
        }
        name += if self.clamped { "" } else { ",swiglu" };
        name += if self.biases { "" } else { ",nobias" };
        if self.weight_on == WeightOn::Input {
            name += ",on_input";
        }
        if self.combine == Combine::Add {
            name += ",add";
        }
        if self.spread != Spread::Random {
            name += &format!(",{:?}", self.spread);
        }
        if self.form != Form::Rows {
            name += &format!(",{:?}", self.form);
        }
        name.to_lowercase()
    }
}

/// One call.
#[derive(Debug, Clone)]
pub struct HostMoe {
    /// Sizes.
    pub spec: MoeSpec,
    /// Steps of one bucket, which differ in live rows and their adapters.
    pub steps: Vec<Step>,
    /// `[tokens, hidden]`.
    pub x: HostTensor,
    /// `[tokens, experts]`.
    pub logits: HostTensor,
    /// `[experts, 2 · inner, hidden]`.
    pub gate_up: HostMatrices,
    /// `[experts, hidden, inner]`.
    pub down: HostMatrices,
    /// `[experts, 2 · inner]` and `[experts, hidden]`.
    pub biases: Option<[Vec<f64>; 2]>,
    /// The table; slices gate, up, down.
    pub adapters: Option<Adapters>,
    /// What the output holds before.
    pub before: HostTensor,
}

impl HostMoe {
    /// Random operands.
    pub fn random(rng: &mut Rng, caps: &Caps, spec: MoeSpec) -> Self {
        let MoeSpec { experts, hidden, inner, dtype, slots, .. } = spec;
        let bucket = spec.tokens + spec.padding;
        let plan = limits(rows_bucket(bucket), slots, caps.tile_rows);
        let mut step = |tokens: usize| {
            let rows: Vec<_> = (0..tokens).map(|_| rng.below(slots + 1).checked_sub(1)).collect();
            Step::of_rows(&rows, bucket, plan)
        };
        let steps = vec![step(spec.tokens), step(spec.tokens.div_ceil(2))];
        let mut logits = Vec::new();
        let same = rng.permutation(experts);
        for _ in 0..bucket {
            let mut row =
                rng.permutation(experts).into_iter().map(|e| 0.25 * e as f64).collect::<Vec<_>>();
            for (e, logit) in row.iter_mut().enumerate() {
                match spec.spread {
                    Spread::Random => {}
                    Spread::Same => *logit = 0.25 * same[e] as f64,
                    Spread::Half if e >= experts / 2 => *logit -= 1e3,
                    Spread::Half => {}
                }
            }
            logits.extend(row);
        }
        let mut gate_up = HostMatrices::random(rng, [experts, 2 * inner, hidden], dtype);
        let mut down = HostMatrices::random(rng, [experts, hidden, inner], dtype);
        (gate_up.form, down.form) = match spec.form {
            Form::Parts(_) => (Form::Parts(inner), Form::Rows),
            Form::Separate(_) => (Form::Separate(inner), Form::Separate(1)),
            other => (other, other),
        };
        HostMoe {
            spec,
            steps,
            x: HostTensor::real(
                &[bucket, hidden],
                dtype,
                &rng.normals(bucket * hidden, 1.0, dtype),
            ),
            logits: HostTensor::real(&[bucket, experts], DType::F32, &logits),
            gate_up,
            down,
            biases: spec
                .biases
                .then(|| [2 * inner, hidden].map(|n| rng.normals(experts * n, 0.5, DType::F32))),
            adapters: random_adapters(rng, spec),
            before: HostTensor::real(
                &[bucket, hidden],
                dtype,
                &rng.normals(bucket * hidden, 1.0, dtype),
            ),
        }
    }

    /// Slices of gate_up.
    pub fn gate_up_places(&self) -> [Place; 2] {
        let (second, stride) = if self.spec.clamped { (1, 2) } else { (self.spec.inner, 1) };
        [Place { slice: 0, offset: 0, stride }, Place { slice: 1, offset: second, stride }]
    }

    /// Slices of down.
    pub fn down_places(&self) -> [Place; 1] {
        [Place { slice: 2, offset: 0, stride: 1 }]
    }

    fn activation(&self) -> Activation {
        match self.spec.clamped {
            true => Activation::ClampedInterleaved { limit: 1.25, alpha: 1.702 },
            false => Activation::Swiglu,
        }
    }

    fn shape(&self) -> RoutingShape {
        RoutingShape {
            tokens: self.x.dims[0],
            top_k: self.spec.top_k,
            experts: self.spec.experts,
            slots: self.spec.slots,
            tile_rows: self.steps[0].limits.tile_rows,
        }
    }

    /// The same call with every row's adapter as given.
    pub fn with_slots(&self, slots: &[Option<usize>]) -> Self {
        let step = Step::of_rows(slots, self.steps[0].bucket.tokens, self.steps[0].limits);
        HostMoe { steps: vec![step], ..self.clone() }
    }

    /// The same call with other adapters in a table of as many slots; none makes it `fused_moe`.
    pub fn with_adapters(&self, adapters: Option<Adapters>) -> Self {
        HostMoe { adapters, ..self.clone() }
    }
}

fn random_adapters(rng: &mut Rng, spec: MoeSpec) -> Option<Adapters> {
    let MoeSpec { experts, hidden, inner, dtype, slots, rank, touch, .. } = spec;
    let half = SliceMeta { k: hidden, n: inner, experts };
    let metas = [half, half, SliceMeta { k: inner, n: hidden, experts }];
    let mut adapters = Adapters::none(dtype, slots, &metas);
    for slot in 0..slots {
        for expert in 0..experts {
            let shared = Arc::new(rng.normals(rank * hidden, (hidden as f64).powf(-0.5), dtype));
            for slice in 0..3 {
                let at = (slot, slice, expert);
                let touched = match touch {
                    Touch::NoTable | Touch::Nothing => false,
                    Touch::All | Touch::SharedA | Touch::RankBySlot => true,
                    Touch::DownOnly => slice == 2,
                    Touch::GateUpOnly => slice < 2,
                    Touch::OneSided => slice == slot % 2,
                    Touch::Ragged => rng.below(3) > 0,
                };
                match (touched, touch) {
                    (false, _) => {}
                    (true, Touch::SharedA) if slice < 2 => {
                        adapters.add_with(rng, at, rank, shared.clone());
                    }
                    (true, Touch::Ragged) => {
                        let rank = 1 + rng.below(rank);
                        adapters.add(rng, at, rank);
                    }
                    (true, Touch::RankBySlot) => {
                        adapters.add(rng, at, (slot + 1) * rank / slots);
                    }
                    (true, _) => adapters.add(rng, at, rank),
                }
            }
        }
    }
    (touch != Touch::NoTable).then_some(adapters)
}

impl HostOp for HostMoe {
    fn keys(&self) -> Vec<OpKey> {
        let op = if self.adapters.is_some() { OpKind::FusedMoeLora } else { OpKind::FusedMoe };
        let key = OpKey::new(op, self.spec.dtype).scheme(Scheme::Dense(self.spec.dtype));
        vec![key, OpKey::new(OpKind::MoeRoute, DType::F32)]
    }

    fn bounds(&self) -> Vec<OpBounds> {
        let MoeSpec { experts, top_k, hidden, inner, .. } = self.spec;
        let moe = OpBounds {
            op: Some(self.keys()[0].op),
            tokens: self.x.dims[0],
            k: hidden,
            n: hidden,
            inner: 2 * inner,
            experts,
            top_k,
            rank: self.adapters.as_ref().map_or(0, Adapters::max_rank),
            context: 0,
        };
        vec![moe, OpBounds { op: Some(OpKind::MoeRoute), k: 0, n: 0, inner: 0, rank: 0, ..moe }]
    }

    fn steps(&self) -> &[Step] {
        &self.steps
    }

    fn bytes(&self) -> usize {
        let MoeSpec { experts, top_k, hidden, inner, slots, dtype, .. } = self.spec;
        let blocks = self.adapters.as_ref().map_or(0, Adapters::block_bytes);
        let rows = 3 * 16 * slots * experts;
        let routing = 64 * (self.x.dims[0] * top_k + experts * (slots + 1));
        // Packing may pad either side of a matrix.
        let matrices = 3 * experts * (hidden + 64) * (inner + 64) * dtype.size();
        (1 << 16) + matrices + blocks + rows + routing + 8 * self.x.bytes.len()
    }

    fn place<B: Backend>(&self, rig: &mut Rig<B>) -> Result<Launch<B>> {
        let MoeSpec { experts, hidden, inner, weight_on, combine, .. } = self.spec;
        let logits = rig.tensor("logits", &self.logits)?;
        let mut routing = rig.routing(self.shape())?;
        let x = rig.tensor("x", &self.x)?;
        let gate_up = rig.weight("gate_up", &self.gate_up)?;
        let down = rig.weight("down", &self.down)?;
        let biases = match &self.biases {
            Some([first, second]) => {
                let first = HostTensor::real(&[experts, 2 * inner], DType::F32, first);
                let second = HostTensor::real(&[experts, hidden], DType::F32, second);
                Some([rig.tensor("gate_up_bias", &first)?, rig.tensor("down_bias", &second)?])
            }
            None => None,
        };
        let lora = match &self.adapters {
            Some(adapters) => Some((
                rig.lora(adapters)?,
                lora_slices(adapters, &self.gate_up_places()),
                lora_slices(adapters, &self.down_places()),
            )),
            None => None,
        };
        let mut out = match combine {
            Combine::Replace => rig.poisoned("out", &self.x.dims, self.x.dtype)?,
            Combine::Add => rig.tensor("out", &self.before)?,
        };
        let activation = self.activation();
        Ok(Box::new(move |cx, plan| {
            MoeRoute {
                logits: &logits,
                live: plan.kv_index(),
                slot: plan.slot(),
                score: RouteScore::SoftmaxTopk,
                correction: None,
                groups: None,
                renorm: false,
                scale: 1.0,
                routing: &mut routing,
            }
            .run(cx)?;
            let moe = FusedMoe {
                x: &x,
                routing: &routing,
                gate_up: &gate_up,
                gate_up_bias: biases.as_ref().map(|[bias, _]| bias),
                down: &down,
                down_bias: biases.as_ref().map(|[_, bias]| bias),
                activation,
                weight_on,
                combine,
                out: &mut out,
            };
            match &lora {
                None => moe.run(cx),
                Some((lora, gate_up_slices, down_slices)) => {
                    FusedMoeLora { moe, lora, gate_up_slices, down_slices }.run(cx)
                }
            }
        }))
    }

    fn expect(&self, step: usize) -> Vec<(&'static str, Expect)> {
        let step = &self.steps[step];
        let MoeSpec { experts, top_k, hidden, inner, dtype, weight_on, combine, .. } = self.spec;
        let of =
            |places: &[Place]| self.adapters.as_ref().map_or(Vec::new(), |a| deltas(a, places));
        let (gate_up_deltas, down_deltas) = (of(&self.gate_up_places()), of(&self.down_places()));
        let layer = Experts {
            hidden,
            inner,
            gate_up: &self.gate_up.values,
            gate_up_bias: self.biases.as_ref().map(|[bias, _]| bias.as_slice()),
            down: &self.down.values,
            down_bias: self.biases.as_ref().map(|[_, bias]| bias.as_slice()),
            activation: self.activation(),
            weight_on,
            gate_up_deltas: &gate_up_deltas,
            down_deltas: &down_deltas,
            round: &|value| round(dtype, value),
            // In f32 a rounding is less than what the sums are off by; it has its place in the bound.
            unsure: if dtype == DType::F32 { 0.0 } else { 1e-5 },
        };
        let route = Route {
            experts,
            top_k,
            score: RouteScore::SoftmaxTopk,
            correction: None,
            groups: None,
            renorm: false,
            scale: 1.0,
        };
        let (x, logits, before) = (self.x.values(), self.logits.values(), self.before.values());
        let (live, slots) = (step.kv_index(), step.slots());
        let mut wants = Vec::new();
        for (t, x) in x.chunks(hidden).enumerate() {
            if live[t] < 0 {
                wants.extend(std::iter::repeat_n(Want::Any, hidden));
                continue;
            }
            let choice = route.choose(&logits[t * experts..(t + 1) * experts]);
            let Token { out, ties } = layer.token(x, &choice.experts, &choice.weights, slots[t]);
            let added = out.iter().zip(ties).enumerate().map(|(h, (value, ties))| match combine {
                Combine::Replace => Want::NearTies(*value, ties),
                Combine::Add => Want::NearTies(value + before[t * hidden + h], ties),
            });
            wants.extend(added);
        }
        vec![
            ("out", Expect::Elements(wants)),
            ("routing.experts", Expect::Free),
            ("routing.weights", Expect::Free),
            ("routing.perm", Expect::Free),
            ("routing.tiles", Expect::Free),
            ("routing.lora_tiles", Expect::Free),
        ]
    }
}

impl ByRow for HostMoe {
    const OUTPUTS: &'static [&'static str] = &["out"];

    fn rows(&self) -> usize {
        self.steps[0].rows()
    }

    fn of_rows(&self, rows: &[usize]) -> Self {
        HostMoe {
            steps: vec![self.steps[0].of_single_rows(rows)],
            x: self.x.of_rows(rows),
            logits: self.logits.of_rows(rows),
            before: self.before.of_rows(rows),
            ..self.clone()
        }
    }
}
