//! Mixture of experts: routing, and both expert projections, plain and with adapters.

use super::dense::check_slices;
use super::runnable;
use crate::checked::{Check, Checked};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::lora::{LoraSlice, LoraTable};
use crate::segments::Segments;
use crate::tensor::{Carver, Index, Tensor, carved_bytes};
use crate::weight::Weight;

/// Some rows of one (expert, slot) group, as kernels read it:
/// `perm[first .. first + rows]` are pairs of this expert, and of this slot in a LoRA tile.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct MoeTile {
    /// The expert.
    pub expert: i32,
    /// The adapter slot; −1 in base tiles.
    pub slot: i32,
    /// First pair, an index into the permutation.
    pub first: i32,
    /// Pairs; 0 in surplus tiles, which lie behind all others.
    pub rows: i32,
}

/// Bounds from which routing memory is carved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoutingShape {
    /// Most rows of a step.
    pub tokens: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Experts of a layer.
    pub experts: usize,
    /// Adapter slots; 0 when adapters are off.
    pub slots: usize,
    /// Most rows of a tile.
    pub tile_rows: usize,
}

impl RoutingShape {
    fn pairs(&self) -> usize {
        self.tokens * self.top_k
    }

    fn tiles(&self) -> usize {
        Segments::bound(self.pairs(), self.experts, self.tile_rows)
    }

    fn lora_tiles(&self) -> usize {
        Segments::bound(self.pairs(), self.experts * self.slots, self.tile_rows)
    }

    fn dims(&self) -> [[usize; 2]; 5] {
        let RoutingShape { tokens, top_k, .. } = *self;
        [
            [tokens, top_k],
            [tokens, top_k],
            [self.pairs(), 1],
            [self.tiles(), 4],
            [self.lora_tiles(), 4],
        ]
    }

    /// Bytes that [`Routing::carve`] takes.
    pub fn bytes(&self) -> usize {
        self.dims().iter().map(|dims| carved_bytes(dims, DType::I32)).sum()
    }
}

/// Where the rows of a step go, made by [`MoeRoute`] and read by the expert products.
///
/// A *pair* t · top_k + j is token t at its j-th expert. One permutation, sorted by (expert, slot)
/// and stable, pairs without an adapter last within their expert, serves two tile lists: tiles by
/// expert for the base product, tiles by (expert, slot) inside them for the deltas. Pairs of padding
/// rows are in neither.
#[derive(Debug)]
pub struct Routing<D: Device> {
    shape: RoutingShape,
    experts: Index<D>,
    weights: Tensor<D>,
    perm: Index<D>,
    tiles: Index<D>,
    lora_tiles: Index<D>,
}

impl<D: Device> Routing<D> {
    /// Memory for the bounds of `shape`.
    ///
    /// # Errors
    /// The carver's buffer is used up.
    pub fn carve(carver: &mut Carver<D>, shape: RoutingShape) -> Result<Self> {
        let [experts, weights, perm, tiles, lora_tiles] = shape.dims();
        Ok(Routing {
            shape,
            experts: Index::words(carver.carve(&experts, DType::I32)?),
            weights: carver.carve(&weights, DType::F32)?,
            perm: Index::words(carver.carve(&perm[..1], DType::I32)?),
            tiles: Index::words(carver.carve(&tiles, DType::I32)?),
            lora_tiles: Index::words(carver.carve(&lora_tiles, DType::I32)?),
        })
    }

    /// The same memory for a bucket of `tokens` rows.
    ///
    /// # Errors
    /// The bucket is larger than the bounds.
    pub fn bucket(&self, tokens: usize) -> Result<Self> {
        if tokens > self.shape.tokens {
            return Err(Error::invalid("routing", format!("{tokens} of {}", self.shape.tokens)));
        }
        let shape = RoutingShape { tokens, ..self.shape };
        let front = |index: &Index<D>, rows| index.tensor().rows(rows).map(Index::words);
        Ok(Routing {
            shape,
            experts: front(&self.experts, tokens)?,
            weights: self.weights.rows(tokens)?,
            perm: front(&self.perm, shape.pairs())?,
            tiles: front(&self.tiles, shape.tiles())?,
            lora_tiles: front(&self.lora_tiles, shape.lora_tiles())?,
        })
    }

    /// The bounds.
    pub fn shape(&self) -> &RoutingShape {
        &self.shape
    }

    /// `[tokens, top_k]`: experts by descending score, ties to the lower; −1 in padding rows.
    pub fn experts(&self) -> &Index<D> {
        &self.experts
    }

    /// `[tokens, top_k]` f32: what each expert's output (or input) is multiplied by.
    pub fn weights(&self) -> &Tensor<D> {
        &self.weights
    }

    /// `[tokens · top_k]`: pairs by (expert, slot); −1 behind the last.
    pub fn perm(&self) -> &Index<D> {
        &self.perm
    }

    /// `[tiles, 4]`, words of [`MoeTile`]: the pairs of each expert.
    pub fn tiles(&self) -> &Index<D> {
        &self.tiles
    }

    /// `[lora_tiles, 4]`, words of [`MoeTile`]: the pairs of each (expert, slot ≥ 0).
    pub fn lora_tiles(&self) -> &Index<D> {
        &self.lora_tiles
    }

    fn operands(&self) -> [(&'static str, &Tensor<D>); 5] {
        [
            ("experts", self.experts.tensor()),
            ("weights", &self.weights),
            ("perm", self.perm.tensor()),
            ("tiles", self.tiles.tensor()),
            ("lora_tiles", self.lora_tiles.tensor()),
        ]
    }
}

/// How router logits become weights of the chosen experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouteScore {
    /// Choose by logit, softmax over the chosen (gpt_oss, mixtral).
    SoftmaxTopk,
    /// Softmax over all, choose; `renorm` divides by the sum of the chosen (qwen3_moe).
    Softmax,
    /// Sigmoid of each, choose by sigmoid + correction, weigh by the sigmoid (deepseek_v3).
    Sigmoid,
}

/// Choice limited to the experts of the best groups (deepseek).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Groups of equal size.
    pub groups: usize,
    /// Groups that are kept.
    pub keep: usize,
    /// A group's score is the sum of this many of its best (1 or 2).
    pub best: usize,
}

/// Chooses experts, and sorts the pairs by (expert, slot).
///
/// Each token gets `top_k` different experts whatever its logits are: one that is no number counts as −∞, and
/// so does a score that is none where scores are chosen by (with a correction, or by groups; else logits are).
/// Weights of a row with infinite logits, or none that is a number, may be no numbers.
#[derive(Debug)]
pub struct MoeRoute<'a, D: Device> {
    /// `[tokens, experts]` f32.
    pub logits: &'a Tensor<D>,
    /// `[tokens]`, [`crate::PlanView::kv_index`]: negative entries mark padding, routed nowhere.
    pub live: &'a Index<D>,
    /// `[tokens]`, [`crate::PlanView::slot`].
    pub slot: &'a Index<D>,
    /// Logits to weights.
    pub score: RouteScore,
    /// `[experts]` f32, added for the choice alone.
    pub correction: Option<&'a Tensor<D>>,
    /// Choice by groups.
    pub groups: Option<ExpertGroups>,
    /// Divide the chosen weights by their sum.
    pub renorm: bool,
    /// Multiplies the weights at the end.
    pub scale: f32,
    /// The result.
    pub routing: &'a mut Routing<D>,
}

impl<D: Device> MoeRoute<'_, D> {
    /// # Errors
    /// A shape or type is another, or operands overlap.
    pub fn check(self) -> Result<Checked<Self>> {
        let check = Check::of("moe_route");
        let RoutingShape { tokens, top_k, experts, slots, .. } = *self.routing.shape();
        check.f32_dense("logits", self.logits, &[tokens, experts])?;
        check.dims("live", self.live.tensor(), &[tokens])?;
        check.dims("slot", self.slot.tensor(), &[tokens])?;
        check.addresses_or_skips("slot", self.slot, slots)?;
        check.that(top_k > 0 && top_k <= experts, || format!("{top_k} of {experts} experts"))?;
        check.that(self.scale.is_finite(), || format!("scale {}", self.scale))?;
        if let Some(ExpertGroups { groups, keep, best }) = self.groups {
            let sound = groups > 0
                && experts.is_multiple_of(groups)
                && (1..=groups).contains(&keep)
                && (1..=experts / groups).contains(&best)
                && top_k <= keep * (experts / groups);
            check.that(sound, || format!("{:?} of {experts} experts", self.groups))?;
        }
        let mut inputs = vec![
            ("logits", self.logits),
            ("live", self.live.tensor()),
            ("slot", self.slot.tensor()),
        ];
        if let Some(correction) = self.correction {
            check.f32_dense("correction", correction, &[experts])?;
            inputs.push(("correction", correction));
        }
        check.disjoint(&self.routing.operands(), &inputs)?;
        Ok(Checked::new(self))
    }
}
runnable!(MoeRoute, moe_route);

/// What lies between the two products of an MLP, on `[gate, up]` of 2·I values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Activation {
    /// First half gate, second half up: `silu(gate) · up`.
    Swiglu,
    /// Even gate, odd up (gpt_oss): g = min(gate, limit), u = clamp(up, ±limit),
    /// `(u + 1) · g · sigmoid(alpha · g)`.
    ClampedInterleaved {
        /// The clamp.
        limit: f32,
        /// Inside the sigmoid.
        alpha: f32,
    },
}

impl Activation {
    /// Its constants are numbers that clamp.
    pub(super) fn check(&self, check: &Check) -> Result<()> {
        match *self {
            Activation::Swiglu => Ok(()),
            Activation::ClampedInterleaved { limit, alpha } => {
                check.that(limit >= 0.0 && alpha.is_finite(), || format!("{self:?}"))
            }
        }
    }
}

/// Where a routing weight multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightOn {
    /// The expert's input (Llama 4); the result is rounded to the compute type, as an operand of
    /// gate_up.
    Input,
    /// The expert's output.
    Output,
}

/// What happens to what `out` holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Combine {
    /// It is replaced.
    Replace,
    /// The experts add to it: a shared expert's output is there already.
    Add,
}

/// Both projections of the chosen experts:
/// `out[t] = Σ_j w_j · (down_e · act(gate_up_e · x[t] + b) + b')` over t's experts e in j order, in
/// f32, rounded once. The activation's result is rounded to the compute type, as an operand of down;
/// so is x · w where the weight is on the input.
/// Padding rows get no defined value.
#[derive(Debug)]
pub struct FusedMoe<'a, D: Device> {
    /// `[tokens, hidden]`.
    pub x: &'a Tensor<D>,
    /// Made by [`MoeRoute`] for the same rows.
    pub routing: &'a Routing<D>,
    /// `[experts, 2 · inner, hidden]`.
    pub gate_up: &'a Weight<D>,
    /// `[experts, 2 · inner]` f32.
    pub gate_up_bias: Option<&'a Tensor<D>>,
    /// `[experts, hidden, inner]`.
    pub down: &'a Weight<D>,
    /// `[experts, hidden]` f32.
    pub down_bias: Option<&'a Tensor<D>>,
    /// Between the two.
    pub activation: Activation,
    /// Where routing weights multiply.
    pub weight_on: WeightOn,
    /// Replace or add.
    pub combine: Combine,
    /// `[tokens, hidden]`.
    pub out: &'a mut Tensor<D>,
}

impl<D: Device> FusedMoe<'_, D> {
    fn validate(&self, check: &Check) -> Result<()> {
        let RoutingShape { tokens, experts, .. } = *self.routing.shape();
        let (hidden, inner) = (self.gate_up.k(), self.down.k());
        let agree = self.gate_up.matrices() == experts
            && self.down.matrices() == experts
            && self.gate_up.n() == 2 * inner
            && self.down.n() == hidden
            && self.gate_up.scheme() == self.down.scheme();
        check.that(agree, || {
            format!(
                "gate_up [{}, {}, {}], down [{}, {}, {}], {experts} experts",
                self.gate_up.matrices(),
                self.gate_up.n(),
                hidden,
                self.down.matrices(),
                self.down.n(),
                inner
            )
        })?;
        self.activation.check(check)?;
        check.dims("x", self.x, &[tokens, hidden])?;
        check.float("x", self.x)?;
        check.rows("x", self.x)?;
        check.dims("out", self.out, &[tokens, hidden])?;
        check.dtype("out", self.out, self.x.dtype())?;
        check.rows("out", self.out)?;
        let mut inputs =
            vec![("x", self.x), ("gate_up", self.gate_up.data()), ("down", self.down.data())];
        for scales in [self.gate_up.scales(), self.down.scales()] {
            inputs.extend(scales.map(|scales| ("scales", scales)));
        }
        inputs.extend(self.routing.operands());
        if let Some(bias) = self.gate_up_bias {
            check.f32_dense("gate_up_bias", bias, &[experts, 2 * inner])?;
            inputs.push(("gate_up_bias", bias));
        }
        if let Some(bias) = self.down_bias {
            check.f32_dense("down_bias", bias, &[experts, hidden])?;
            inputs.push(("down_bias", bias));
        }
        check.disjoint(&[("out", self.out)], &inputs)
    }

    /// # Errors
    /// A shape or type is another, or the output overlaps an input.
    pub fn check(self) -> Result<Checked<Self>> {
        self.validate(&Check::of("fused_moe"))?;
        Ok(Checked::new(self))
    }
}
runnable!(FusedMoe, fused_moe);

/// The same with the deltas of each (expert, adapter): gate_up and down each become
/// `W·x + b + scale · B·(A·x)`, with A, B and scale of the row's slot, the slice and the expert.
#[derive(Debug)]
pub struct FusedMoeLora<'a, D: Device> {
    /// The base products.
    pub moe: FusedMoe<'a, D>,
    /// Arena and rows.
    pub lora: &'a LoraTable<D>,
    /// Slices of gate_up.
    pub gate_up_slices: &'a [LoraSlice],
    /// Slices of down.
    pub down_slices: &'a [LoraSlice],
}

impl<D: Device> FusedMoeLora<'_, D> {
    /// # Errors
    /// As [`FusedMoe::check`]; or a slice leaves its weight.
    pub fn check(self) -> Result<Checked<Self>> {
        let check = Check::of("fused_moe_lora");
        self.moe.validate(&check)?;
        check_slices(&check, self.lora, self.gate_up_slices, self.moe.gate_up)?;
        check_slices(&check, self.lora, self.down_slices, self.moe.down)?;
        check.that(self.lora.dtype() == self.moe.x.dtype(), || {
            format!("blocks are {}, x is {}", self.lora.dtype(), self.moe.x.dtype())
        })?;
        check.that(self.lora.slots() == self.moe.routing.shape().slots, || {
            format!("{} slots, routing for {:?}", self.lora.slots(), self.moe.routing.shape())
        })?;
        check.disjoint(
            &[("out", self.moe.out)],
            &[("arena", self.lora.arena()), ("rows", self.lora.rows().tensor())],
        )?;
        Ok(Checked::new(self))
    }
}
runnable!(FusedMoeLora, fused_moe_lora);
