//! Routing: the choice of experts, and one sort of the pairs by (expert, slot).

use amphora_cuda_kernels::args::{
    RouteRankArgs, RouteSortArgs, RouteTilesArgs, RouteTopkArgs, score,
};
use amphora_cuda_kernels::{
    DevicePtr, ROUTE_CHOOSE, ROUTE_FEW, ROUTE_RANK, ROUTE_SORT, ROUTE_TILES, ROUTE_TOPK,
};
use amphora_hal::ops::{MoeRoute, RouteScore};
use amphora_hal::{DType, Error, OpKey, OpKind, Result};

use crate::device::{Cuda, CudaStream};
use crate::heuristics::{self, RoutePath, per_block, per_thread};
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
    let path = heuristics::tuned::routing(&shape, groups, (cuda.limits(), cuda.tuning()));
    let sort = sort_args(&op, topk, path)?;
    match path {
        RoutePath::Few => launch(cuda, s, ROUTE_FEW, DType::F32, per_block(1).overlapped(), &sort),
        RoutePath::Sort(grid) => launch(cuda, s, ROUTE_SORT, DType::F32, grid, &sort),
        RoutePath::ChooseThenSort(grid) => {
            let threads = ROUTE_CHOOSE.id().kernel().threads as usize;
            let choose = per_thread(32 * shape.tokens, threads).overlapped();
            launch(cuda, s, ROUTE_CHOOSE, DType::F32, choose, &sort)?;
            launch(cuda, s, ROUTE_SORT, DType::F32, grid, &sort)
        }
        RoutePath::General => general(cuda, s, &op, topk, sorted),
    }
}

/// Arguments of the kernels that sort in shared memory.
fn sort_args(
    op: &MoeRoute<'_, Cuda>,
    choose: RouteTopkArgs,
    path: RoutePath,
) -> Result<RouteSortArgs> {
    let shape = op.routing.shape();
    let (tiles, lora_tiles) = (op.routing.tiles().tensor(), op.routing.lora_tiles().tensor());
    Ok(RouteSortArgs {
        choose,
        perm: ptr(op.routing.perm().tensor()),
        tiles: ptr(tiles),
        lora_tiles: ptr(lora_tiles),
        tokens: int(shape.tokens)?,
        tile_rows: int(shape.tile_rows)?,
        tile_count: int(tiles.dims()[0])?,
        lora_tile_count: int(lora_tiles.dims()[0])?,
        chosen: i32::from(matches!(path, RoutePath::ChooseThenSort(_))),
        reserved: 0,
    })
}

/// Any number of experts, slots and groups; `sorted` holds as many words as there are pairs.
fn general(
    cuda: &Cuda,
    s: &mut CudaStream,
    op: &MoeRoute<'_, Cuda>,
    topk: RouteTopkArgs,
    sorted: DevicePtr,
) -> Result<()> {
    let shape = *op.routing.shape();
    let pairs = shape.tokens * shape.top_k;
    let groups = topk.groups.unsigned_abs() as usize;
    // The largest sort key, and the number of pairs, must be counted in 31 bits.
    int(shape.experts * (shape.slots + 1))?;
    let Some(grid) = heuristics::topk(shape.tokens, shape.experts, groups) else {
        let key = OpKey::new(OpKind::MoeRoute, DType::F32);
        return Err(Error::Unsupported { key, reason: TOO_MANY_EXPERTS });
    };
    launch(cuda, s, ROUTE_TOPK, DType::F32, grid, &topk)?;
    let perm = ptr(op.routing.perm().tensor());
    let rank = RouteRankArgs { keys: topk.keys, sorted, perm, pairs: int(pairs)?, reserved: 0 };
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
