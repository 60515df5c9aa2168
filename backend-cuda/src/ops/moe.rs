//! Mixture of experts: routing, and both expert projections, plain and with adapters.

use amphora_cuda_kernels::args::{
    LoraArgs, LoraShrinkArgs, MoeCombineArgs, MoeDownArgs, MoeGateUpArgs, RouteRankArgs,
    RouteTilesArgs, RouteTopkArgs, score,
};
use amphora_cuda_kernels::{
    DevicePtr, LORA_SHRINK, MOE_COMBINE, MOE_DOWN, MOE_DOWN_LORA, MOE_GATE_UP, MOE_GATE_UP_LORA,
    ROUTE_RANK, ROUTE_TILES, ROUTE_TOPK,
};
use amphora_hal::ops::{Combine, FusedMoe, FusedMoeLora, MoeRoute, RouteScore, WeightOn};
use amphora_hal::{DType, Error, LoraSlice, LoraTable, OpKey, OpKind, Result};

use super::{activation_args, lora_args};
use crate::device::{Cuda, CudaStream};
use crate::heuristics::{self, MoeBytes, per_block, per_thread};
use crate::launch::{Workspace, int, launch, optional, pitch, ptr, weight_type};

pub(super) fn moe_route(cuda: &Cuda, s: &mut CudaStream, op: MoeRoute<'_, Cuda>) -> Result<()> {
    let shape = *op.routing.shape();
    let pairs = shape.tokens * shape.top_k;
    let [keys, sorted] = heuristics::route_pieces(pairs);
    let mut workspace = Workspace::of(s);
    let (keys, sorted) = (workspace.take(keys)?, workspace.take(sorted)?);
    let (groups, keep, best) = op.groups.map_or((0, 0, 0), |g| (g.groups, g.keep, g.best));
    let topk = RouteTopkArgs {
        logits: ptr(op.logits),
        live: ptr(op.live.tensor()),
        slot: ptr(op.slot.tensor()),
        correction: optional(op.correction),
        chosen: ptr(op.routing.experts().tensor()),
        weights: ptr(op.routing.weights()),
        keys,
        experts: int(shape.experts)?,
        top_k: int(shape.top_k)?,
        slots: int(shape.slots)?,
        score: match op.score {
            RouteScore::SoftmaxTopk => score::SOFTMAX_TOPK,
            RouteScore::Softmax => score::SOFTMAX,
            RouteScore::Sigmoid => score::SIGMOID,
        },
        groups: int(groups)?,
        keep: int(keep)?,
        best: int(best)?,
        renorm: i32::from(op.renorm),
        scale: op.scale,
        reserved: 0,
    };
    // The largest sort key, and the number of pairs, must be counted in 31 bits.
    int(shape.experts * (shape.slots + 1))?;
    let Some(grid) = heuristics::topk(shape.tokens, shape.experts, groups) else {
        let key = OpKey::new(OpKind::MoeRoute, DType::F32);
        return Err(Error::Unsupported { key, reason: super::TOO_MANY_EXPERTS });
    };
    launch(cuda, s, ROUTE_TOPK, DType::F32, grid, &topk)?;
    let perm = ptr(op.routing.perm().tensor());
    let rank = RouteRankArgs { keys, sorted, perm, pairs: int(pairs)?, reserved: 0 };
    let threads = ROUTE_RANK.id().kernel().threads as usize;
    launch(cuda, s, ROUTE_RANK, DType::F32, per_thread(pairs, threads), &rank)?;
    let (tiles, lora_tiles) = (op.routing.tiles().tensor(), op.routing.lora_tiles().tensor());
    let lists = RouteTilesArgs {
        sorted,
        tiles: ptr(tiles),
        lora_tiles: ptr(lora_tiles),
        pairs: int(pairs)?,
        slots: int(shape.slots)?,
        tile_rows: int(shape.tile_rows)?,
        tile_count: int(tiles.dims()[0])?,
        lora_tile_count: int(lora_tiles.dims()[0])?,
        reserved: 0,
    };
    launch(cuda, s, ROUTE_TILES, DType::F32, per_block(1), &lists)
}

/// The adapters of both projections.
struct Adapters<'a> {
    table: &'a LoraTable<Cuda>,
    gate_up: &'a [LoraSlice],
    down: &'a [LoraSlice],
}

pub(super) fn fused_moe(cuda: &Cuda, s: &mut CudaStream, op: FusedMoe<'_, Cuda>) -> Result<()> {
    experts(cuda, s, op, None)
}

pub(super) fn fused_moe_lora(
    cuda: &Cuda,
    s: &mut CudaStream,
    op: FusedMoeLora<'_, Cuda>,
) -> Result<()> {
    let FusedMoeLora { moe, lora, gate_up_slices, down_slices } = op;
    let adapters = Adapters { table: lora, gate_up: gate_up_slices, down: down_slices };
    experts(cuda, s, moe, Some(&adapters))
}

/// Both products and the sum over a token's experts, with a shrink in front of each product if there
/// are adapters.
fn experts(
    cuda: &Cuda,
    s: &mut CudaStream,
    op: FusedMoe<'_, Cuda>,
    adapters: Option<&Adapters<'_>>,
) -> Result<()> {
    let kind = if adapters.is_some() { OpKind::FusedMoeLora } else { OpKind::FusedMoe };
    let shape = *op.routing.shape();
    let (hidden, inner, dtype) = (op.gate_up.k(), op.down.k(), op.x.dtype());
    let pairs = shape.tokens * shape.top_k;
    let lora = adapters.is_some();
    let pieces =
        heuristics::moe_pieces(MoeBytes { pairs, inner, hidden, element: dtype.size(), lora });
    let mut workspace = Workspace::of(s);
    let [act, y, shrunk] =
        [workspace.take(pieces[0])?, workspace.take(pieces[1])?, workspace.take(pieces[2])?];
    let (gate_up_lora, down_lora) = match adapters {
        Some(Adapters { table, gate_up, down }) => {
            (lora_args(kind, table, gate_up, shrunk)?, lora_args(kind, table, down, shrunk)?)
        }
        None => (LoraArgs::NONE, LoraArgs::NONE),
    };
    let (perm, tiles) = (op.routing.perm().tensor(), op.routing.tiles().tensor());
    let lora_tiles = op.routing.lora_tiles().tensor();
    let lora_tile_count = if lora { lora_tiles.dims()[0] } else { 0 };
    let weights = ptr(op.routing.weights());
    let (input_weights, output_weights) = match op.weight_on {
        WeightOn::Input => (weights, DevicePtr::NULL),
        WeightOn::Output => (DevicePtr::NULL, weights),
    };
    let (act_kind, limit, alpha) = activation_args(op.activation);

    let gate_up = MoeGateUpArgs {
        x: ptr(op.x),
        weight: ptr(op.gate_up.data()),
        bias: optional(op.gate_up_bias),
        act,
        perm: ptr(perm),
        tiles: ptr(tiles),
        pair_weights: input_weights,
        lora_tiles: ptr(lora_tiles),
        lora: gate_up_lora,
        x_pitch: pitch(op.x)?,
        lora_tile_count: int(lora_tile_count)?,
        hidden: int(hidden)?,
        inner: int(inner)?,
        top_k: int(shape.top_k)?,
        weight_type: weight_type(kind, dtype, op.gate_up.scheme())?,
        activation: act_kind,
        limit,
        alpha,
    };
    let down = MoeDownArgs {
        act,
        weight: ptr(op.down.data()),
        bias: optional(op.down_bias),
        y,
        perm: ptr(perm),
        tiles: ptr(tiles),
        lora_tiles: ptr(lora_tiles),
        lora: down_lora,
        lora_tile_count: int(lora_tile_count)?,
        hidden: int(hidden)?,
        inner: int(inner)?,
        weight_type: weight_type(kind, dtype, op.down.scheme())?,
    };
    let combine = MoeCombineArgs {
        y,
        experts: ptr(op.routing.experts().tensor()),
        weights: output_weights,
        out: ptr(op.out),
        out_pitch: pitch(op.out)?,
        hidden: int(hidden)?,
        top_k: int(shape.top_k)?,
        add: i32::from(op.combine == Combine::Add),
        reserved: 0,
    };
    // x row by pair, in the order of the permutation; activations lie in that order already.
    let shrink_x = LoraShrinkArgs {
        x: gate_up.x,
        tiles: ptr(lora_tiles),
        perm: ptr(perm),
        pair_weights: input_weights,
        lora: gate_up.lora,
        x_pitch: gate_up.x_pitch,
        k: gate_up.hidden,
        tile_words: 4,
        pairs_per_row: gate_up.top_k,
        reserved: 0,
    };
    let shrink_act = LoraShrinkArgs {
        x: act,
        perm: DevicePtr::NULL,
        pair_weights: DevicePtr::NULL,
        lora: down.lora,
        x_pitch: i64::from(down.inner),
        k: down.inner,
        pairs_per_row: 1,
        ..shrink_x
    };
    let shrink = |s: &mut CudaStream, args: &LoraShrinkArgs| {
        let slices = args.lora.slice_count.unsigned_abs() as usize;
        launch(cuda, s, LORA_SHRINK, dtype, heuristics::shrink(lora_tile_count, slices), args)
    };
    let (gate_up_entry, down_entry) =
        if lora { (MOE_GATE_UP_LORA, MOE_DOWN_LORA) } else { (MOE_GATE_UP, MOE_DOWN) };
    let tile_count = tiles.dims()[0];
    shrink(s, &shrink_x)?;
    // A block makes gates and ups, so it takes twice the activations' outputs.
    launch(cuda, s, gate_up_entry, dtype, heuristics::tiled(tile_count, 2 * inner), &gate_up)?;
    shrink(s, &shrink_act)?;
    launch(cuda, s, down_entry, dtype, heuristics::tiled(tile_count, hidden), &down)?;
    launch(cuda, s, MOE_COMBINE, dtype, per_block(shape.tokens), &combine)
}
