//! Mixture of experts: routing, and both expert projections, plain and with adapters.
//!
//! `heuristics::tuned` chooses among the implementations of the projections by tokens, shape and
//! architecture; each takes the same [`Experts`].

mod general;
mod prefill;
mod route;
mod stream;

use amphora_cuda_kernels::DevicePtr;
use amphora_cuda_kernels::args::{LoraArgs, MoeCombineArgs, MoeDownArgs, MoeGateUpArgs};
use amphora_hal::ops::{Activation, Combine, FusedMoe, FusedMoeLora, WeightOn};
use amphora_hal::{DType, LoraSlice, LoraTable, OpKind, Result, Scheme};

pub(super) use self::route::moe_route;
use super::{activation_args, lora_args};
use crate::device::{Cuda, CudaStream};
use crate::heuristics::{self, MoeBytes, MoeCall, MoePath};
use crate::launch::{Workspace, int, optional, pitch, ptr, weight_type};
use crate::tuning::operators::Deltas;

/// The adapters of both projections.
struct Adapters<'a> {
    table: &'a LoraTable<Cuda>,
    gate_up: &'a [LoraSlice],
    down: &'a [LoraSlice],
}

pub(super) fn fused_moe(cuda: &Cuda, s: &mut CudaStream, op: FusedMoe<'_, Cuda>) -> Result<()> {
    run(cuda, s, &Experts::new(op, None))
}

pub(super) fn fused_moe_lora(
    cuda: &Cuda,
    s: &mut CudaStream,
    op: FusedMoeLora<'_, Cuda>,
) -> Result<()> {
    let FusedMoeLora { moe, lora, gate_up_slices, down_slices } = op;
    let adapters = Adapters { table: lora, gate_up: gate_up_slices, down: down_slices };
    run(cuda, s, &Experts::new(moe, Some(adapters)))
}

fn run(cuda: &Cuda, s: &mut CudaStream, experts: &Experts<'_>) -> Result<()> {
    let top_k = experts.op.routing.shape().top_k;
    let by = (cuda.limits(), cuda.tuning());
    match heuristics::tuned::experts(&experts.call()?, top_k, by) {
        MoePath::Stream(tiles) => stream::run(cuda, s, experts, tiles),
        MoePath::Prefill(how) => prefill::run(cuda, s, experts, how),
        MoePath::General => general::run(cuda, s, experts, Deltas::Inside),
        MoePath::GeneralApart => general::run(cuda, s, experts, Deltas::Apart),
    }
}

/// One call of either operator, and the sizes that every implementation asks for.
struct Experts<'a> {
    op: FusedMoe<'a, Cuda>,
    adapters: Option<Adapters<'a>>,
    tokens: usize,
    /// (token, j) pairs.
    pairs: usize,
    hidden: usize,
    /// Width after the activation.
    inner: usize,
    /// The compute type.
    dtype: DType,
    /// Entries of the list of base tiles, surplus ones included.
    tile_count: usize,
    /// Entries of the list of LoRA tiles; 0 without adapters.
    lora_tile_count: usize,
}

impl<'a> Experts<'a> {
    /// Workspace of what lies between: the activations, the outputs of each pair, and the shrunk rows of one
    /// product at a time, of no bytes without adapters.
    fn intermediates(&self, workspace: &mut Workspace) -> Result<[DevicePtr; 3]> {
        let &Experts { pairs, inner, hidden, dtype, .. } = self;
        let lora = self.adapters.is_some();
        let [act, y, shrunk] =
            heuristics::moe_pieces(MoeBytes { pairs, inner, hidden, element: dtype.size(), lora });
        Ok([workspace.take(act)?, workspace.take(y)?, workspace.take(shrunk)?])
    }

    fn new(op: FusedMoe<'a, Cuda>, adapters: Option<Adapters<'a>>) -> Self {
        let shape = *op.routing.shape();
        let count = |tiles: &amphora_hal::Index<Cuda>| tiles.tensor().dims()[0];
        Experts {
            tokens: shape.tokens,
            pairs: shape.tokens * shape.top_k,
            hidden: op.gate_up.k(),
            inner: op.down.k(),
            dtype: op.x.dtype(),
            tile_count: count(op.routing.tiles()),
            lora_tile_count: adapters.as_ref().map_or(0, |_| count(op.routing.lora_tiles())),
            op,
            adapters,
        }
    }

    /// What the choice of an implementation depends on.
    fn call(&self) -> Result<MoeCall> {
        Ok(MoeCall {
            tokens: self.tokens,
            pairs: self.pairs,
            experts: self.op.routing.shape().experts,
            hidden: self.hidden,
            inner: self.inner,
            dtype: self.dtype,
            tiles: self.tile_count,
            lora_tiles: self.lora_tile_count,
            tile_rows: self.op.routing.shape().tile_rows,
            plain: self.is_plain()?,
            x_bytes: self.tokens * pitch(self.op.x)? as usize * self.dtype.size(),
        })
    }

    /// Whether rows of x lie on 16 bytes, weights are of the compute type, routing weights multiply
    /// outputs, and slices are gates, ups and the whole of down, as models name them.
    fn is_plain(&self) -> Result<bool> {
        let op = &self.op;
        let aligned = ptr(op.x).0.is_multiple_of(16)
            && (pitch(op.x)? as usize * self.dtype.size()).is_multiple_of(16);
        let stored =
            op.gate_up.scheme() == Scheme::Dense(self.dtype) && op.weight_on == WeightOn::Output;
        let Some(Adapters { gate_up, down, .. }) = &self.adapters else {
            return Ok(aligned && stored);
        };
        let (second, stride) = match op.activation {
            Activation::Swiglu => (self.inner, 1),
            Activation::ClampedInterleaved { .. } => (1, 2),
        };
        let is = |slice: &LoraSlice, offset, stride, len| {
            (slice.out_offset, slice.out_stride, slice.len) == (offset, stride, len)
        };
        let sliced = match (gate_up, down) {
            ([gate, up], [down]) => {
                is(gate, 0, stride, self.inner)
                    && is(up, second, stride, self.inner)
                    && is(down, 0, 1, self.hidden)
            }
            _ => false,
        };
        Ok(aligned && stored && sliced)
    }

    fn kind(&self) -> OpKind {
        if self.adapters.is_some() { OpKind::FusedMoeLora } else { OpKind::FusedMoe }
    }

    /// The deltas of one projection; `slices` names which of the adapters' it has.
    fn lora(
        &self,
        slices: impl Fn(&Adapters<'a>) -> &'a [LoraSlice],
        shrunk: DevicePtr,
    ) -> Result<LoraArgs> {
        self.adapters.as_ref().map_or(Ok(LoraArgs::NONE), |adapters| {
            lora_args(self.kind(), adapters.table, slices(adapters), shrunk)
        })
    }

    /// Routing weights for the input of gate_up and for the output of down: one of them is null.
    fn pair_weights(&self) -> [DevicePtr; 2] {
        let weights = ptr(self.op.routing.weights());
        match self.op.weight_on {
            WeightOn::Input => [weights, DevicePtr::NULL],
            WeightOn::Output => [DevicePtr::NULL, weights],
        }
    }

    /// Arguments of gate_up: `act` gets its result, `shrunk` holds its shrunk rows.
    fn gate_up(&self, act: DevicePtr, shrunk: DevicePtr) -> Result<MoeGateUpArgs> {
        let op = &self.op;
        let (activation, limit, alpha) = activation_args(op.activation);
        Ok(MoeGateUpArgs {
            x: ptr(op.x),
            weight: ptr(op.gate_up.data()),
            bias: optional(op.gate_up_bias),
            act,
            perm: ptr(op.routing.perm().tensor()),
            tiles: ptr(op.routing.tiles().tensor()),
            pair_weights: self.pair_weights()[0],
            lora_tiles: ptr(op.routing.lora_tiles().tensor()),
            lora: self.lora(|adapters| adapters.gate_up, shrunk)?,
            x_pitch: pitch(op.x)?,
            lora_tile_count: int(self.lora_tile_count)?,
            hidden: int(self.hidden)?,
            inner: int(self.inner)?,
            top_k: int(op.routing.shape().top_k)?,
            weight_type: weight_type(self.kind(), self.dtype, op.gate_up.scheme())?,
            activation,
            limit,
            alpha,
        })
    }

    /// Arguments of down: from `act` to `y`, a row for each pair.
    fn down(&self, act: DevicePtr, y: DevicePtr, shrunk: DevicePtr) -> Result<MoeDownArgs> {
        let op = &self.op;
        Ok(MoeDownArgs {
            act,
            weight: ptr(op.down.data()),
            bias: optional(op.down_bias),
            y,
            perm: ptr(op.routing.perm().tensor()),
            tiles: ptr(op.routing.tiles().tensor()),
            lora_tiles: ptr(op.routing.lora_tiles().tensor()),
            lora: self.lora(|adapters| adapters.down, shrunk)?,
            lora_tile_count: int(self.lora_tile_count)?,
            hidden: int(self.hidden)?,
            inner: int(self.inner)?,
            weight_type: weight_type(self.kind(), self.dtype, op.down.scheme())?,
        })
    }

    /// Arguments of the sum over a token's experts.
    fn combine(&self, y: DevicePtr) -> Result<MoeCombineArgs> {
        let op = &self.op;
        Ok(MoeCombineArgs {
            y,
            experts: ptr(op.routing.experts().tensor()),
            weights: self.pair_weights()[1],
            out: ptr(op.out),
            out_pitch: pitch(op.out)?,
            hidden: int(self.hidden)?,
            top_k: int(op.routing.shape().top_k)?,
            add: i32::from(op.combine == Combine::Add),
            reserved: 0,
        })
    }
}
