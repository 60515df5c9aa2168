//! Routing: the choice of experts, and one sort of the pairs by (expert, slot).

use amphora_cuda_kernels::args::{RouteRankArgs, RouteTilesArgs, RouteTopkArgs, score};
use amphora_cuda_kernels::{ROUTE_RANK, ROUTE_TILES, ROUTE_TOPK};
use amphora_hal::ops::{MoeRoute, RouteScore};
use amphora_hal::{DType, Error, OpKey, OpKind, Result};

use crate::device::{Cuda, CudaStream};
use crate::heuristics::{self, per_block, per_thread};
use crate::launch::{Workspace, int, launch, optional, ptr};
use crate::ops::TOO_MANY_EXPERTS;

pub(crate) fn moe_route(cuda: &Cuda, s: &mut CudaStream, op: MoeRoute<'_, Cuda>) -> Result<()> {
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
        return Err(Error::Unsupported { key, reason: TOO_MANY_EXPERTS });
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
