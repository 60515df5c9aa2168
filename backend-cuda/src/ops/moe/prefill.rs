//! Both expert products of many tokens on tensor cores, and the sum over a token's experts. Those of warpgroups are
//! one launch behind a gather of the tokens for tensor maps to find, if all blocks run at once, else two; those of
//! warps are always two. Adapters have a shrink in front of each product. Where experts have neither few tokens nor too
//! many, and there is room for it, the second is in the launch of both products; the first is in the gather's there, and
//! where experts have many. Else each is by itself, and so are the products.

use amphora_cuda_kernels::args::{
    MAX_RANK, MoePrefillArgs, MoePrefillBothArgs, MoePrefillGatherArgs, MoePrefillGatherShrinkArgs,
    MoePrefillShrinkArgs, TensorMap, needs,
};
use amphora_cuda_kernels::{
    DevicePtr, Entry, MOE_COMBINE, MOE_PREFILL, MOE_PREFILL_DOWN, MOE_PREFILL_FEW,
    MOE_PREFILL_FEW_DOWN, MOE_PREFILL_FEW_GATE_UP, MOE_PREFILL_GATE_UP, MOE_PREFILL_GATHER,
    MOE_PREFILL_GATHER_SHRINK, MOE_PREFILL_LORA, MOE_PREFILL_MMA_DOWN, MOE_PREFILL_MMA_GATE_UP,
    MOE_PREFILL_SHRINK, MOE_PREFILL_SOME, MOE_PREFILL_SOME_DOWN, MOE_PREFILL_SOME_GATE_UP,
    MOE_PREFILL_SOME_LORA,
};
use amphora_hal::ops::Activation;
use amphora_hal::{ARENA_UNIT, DType, Result};

use super::Experts;
use crate::device::{Cuda, CudaStream};
use crate::driver::Tiled;
use crate::heuristics::{self, MoeBytes, MoePrefill, PrefillShape, STREAM_SHRUNK};
use crate::jit::Variant;
use crate::launch::{Workspace, int, launch, launch_variant, runs_at_once};

/// Rows of a warpgroup's product, and the k of one box.
const ROWS: usize = 64;
const DEPTH: usize = 64;
/// Tokens of a box, and shrunk rows.
const TOKENS: usize = 16;
const WINDOW: usize = 32;

/// Boxes of gate_up `[experts, 2 · inner, hidden]`: 8 gates, their 8 ups, and so on four times, which
/// lie in one thread of the product.
fn gate_up_map(experts: &Experts<'_>, start: DevicePtr) -> Result<TensorMap> {
    let &Experts { hidden, inner, dtype, .. } = experts;
    let row = hidden * dtype.size();
    let (output, half) = match experts.op.activation {
        Activation::Swiglu => (row, inner * row),
        Activation::ClampedInterleaved { .. } => (2 * row, row),
    };
    let count = experts.op.routing.shape().experts;
    Tiled {
        dtype,
        start,
        dims: [hidden, 8, 2, inner / 8, count],
        strides: [0, output, half, 8 * output, 2 * inner * row],
        box_dims: [DEPTH, 8, 2, ROWS / 16, 1],
    }
    .encode()
}

/// Boxes of down `[experts, hidden, inner]`: the even and the odd ones of 16 rows, and so on four times, so
/// that neighbours lie in one thread of the product; or rows as they come where they are not whole sixteens.
fn down_map(experts: &Experts<'_>, start: DevicePtr) -> Result<TensorMap> {
    let &Experts { hidden, inner, dtype, .. } = experts;
    let row = inner * dtype.size();
    let count = experts.op.routing.shape().experts;
    let plain = Tiled {
        dtype,
        start,
        dims: [inner, 8, hidden / 8, 1, count],
        strides: [0, row, 8 * row, row, hidden * row],
        box_dims: [DEPTH, 8, ROWS / 8, 1, 1],
    };
    if !hidden.is_multiple_of(16) {
        return plain.encode();
    }
    Tiled {
        dims: [inner, 8, 2, hidden / 16, count],
        strides: [0, 2 * row, row, 16 * row, hidden * row],
        box_dims: [DEPTH, 8, 2, ROWS / 16, 1],
        ..plain
    }
    .encode()
}

/// Boxes of `rows` rows `[pairs, width]` by position.
fn row_map(
    experts: &Experts<'_>,
    start: DevicePtr,
    width: usize,
    rows: usize,
) -> Result<TensorMap> {
    Tiled {
        dtype: experts.dtype,
        start,
        // A map has a row at least.
        dims: [width, experts.pairs.max(1)],
        strides: [0, width * experts.dtype.size()],
        box_dims: [DEPTH, rows],
    }
    .encode()
}

/// Rank classes whose blocks B come in boxes; of smaller ones all rows come in one piece.
const FACTOR_RANKS: [usize; 6] = [48, 64, 96, 128, 192, 256];
/// The rank of a box, and units of a block of the products.
const STEP: usize = 32;
const UNITS: usize = 2;

/// Boxes of blocks B `[rows, rank]` that start anywhere in the arena, for each of [`FACTOR_RANKS`].
fn factor_maps(
    dtype: DType,
    arena: DevicePtr,
    rows: usize,
    box_rows: usize,
) -> Result<[TensorMap; FACTOR_RANKS.len()]> {
    let mut maps = [TensorMap::default(); FACTOR_RANKS.len()];
    for (map, rank) in maps.iter_mut().zip(FACTOR_RANKS) {
        *map = Tiled {
            dtype,
            start: arena,
            // As many blocks as the table can name; it names only those that there are.
            dims: [rank, rows, 1 << 31],
            strides: [0, rank * dtype.size(), ARENA_UNIT],
            box_dims: [STEP, box_rows, 1],
        }
        .encode_plain()?;
    }
    Ok(maps)
}

pub(super) fn run(
    cuda: &Cuda,
    s: &mut CudaStream,
    experts: &Experts<'_>,
    how: MoePrefill,
) -> Result<()> {
    let &Experts { pairs, hidden, inner, dtype, tokens, .. } = experts;
    let lora = experts.adapters.is_some();
    let routing = experts.op.routing.shape();
    let mut workspace = Workspace::of(s);
    let [act, y, shrunk] = experts.intermediates(&mut workspace)?;
    let of = experts.gate_up(act, shrunk)?;
    let to = experts.down(act, y, shrunk)?;
    let bytes = MoeBytes { pairs, inner, hidden, element: dtype.size(), lora };
    let gathered = match how.warpgroups {
        true => workspace.take(heuristics::gathered_bytes(bytes))?,
        false => DevicePtr::NULL,
    };
    let [map, down_map, tokens_map, act_map] = if how.warpgroups {
        [
            gate_up_map(experts, of.weight)?,
            down_map(experts, to.weight)?,
            row_map(experts, gathered, hidden, TOKENS)?,
            row_map(experts, act, inner, TOKENS)?,
        ]
    } else {
        [TensorMap::default(); 4]
    };
    // Behind what other products keep clear.
    let ready = DevicePtr(workspace.cleared()?.0 + STREAM_SHRUNK.iter().sum::<usize>() as u64);
    let deltas = how.warpgroups && lora;
    // Of gate and of up, each in two parts, or f32 as two.
    let shrunk_map = match deltas {
        true => row_map(experts, shrunk, 4 * MAX_RANK, WINDOW)?,
        false => TensorMap::default(),
    };
    let factors = |rows: usize, box_rows: usize| match deltas {
        true => factor_maps(dtype, of.lora.arena, rows, box_rows),
        false => Ok([TensorMap::default(); FACTOR_RANKS.len()]),
    };
    // Slices are gate, up and down, as `Experts::is_plain` made sure; without adapters there are none.
    let tables = |slices: &[i32]| match *slices {
        [gate, up] => [gate, up],
        [down] => [down, -1],
        _ => [-1, -1],
    };
    let gate_up_tables = [of.lora.slices[0].table, of.lora.slices[1].table];
    let gate_up = MoePrefillArgs {
        map,
        tokens: tokens_map,
        shrunk_map,
        factors: factors(inner, UNITS * ROWS / 2)?,
        weight: of.weight,
        x: of.x,
        bias: of.bias,
        out: act,
        perm: of.perm,
        tiles: of.tiles,
        lora_tiles: of.lora_tiles,
        arena: of.lora.arena,
        rows: of.lora.rows,
        shrunk,
        x_pitch: of.x_pitch,
        tile_count: int(experts.tile_count)?,
        lora_tile_count: of.lora_tile_count,
        table_rows: of.lora.table_rows,
        tables: tables(if lora { &gate_up_tables } else { &[] }),
        hidden: of.hidden,
        inner: of.inner,
        experts: int(routing.experts)?,
        top_k: of.top_k,
        activation: of.activation,
        limit: of.limit,
        alpha: of.alpha,
        ready,
    };
    let down = MoePrefillArgs {
        map: down_map,
        tokens: act_map,
        factors: factors(hidden, UNITS * ROWS)?,
        weight: to.weight,
        x: act,
        bias: to.bias,
        out: y,
        x_pitch: to.inner.into(),
        tables: tables(if lora { std::slice::from_ref(&to.lora.slices[0].table) } else { &[] }),
        ..gate_up
    };
    let shrink_x = MoePrefillShrinkArgs {
        x: gate_up.x,
        perm: gate_up.perm,
        lora_tiles: gate_up.lora_tiles,
        arena: gate_up.arena,
        rows: gate_up.rows,
        shrunk,
        x_pitch: gate_up.x_pitch,
        lora_tile_count: gate_up.lora_tile_count,
        table_rows: gate_up.table_rows,
        tables: gate_up.tables,
        k: gate_up.hidden,
        top_k: gate_up.top_k,
        // The gather waits for all in front before it lets the shrink begin, which needs nothing of it.
        needs: if how.warpgroups { needs::NOTHING } else { needs::ALL },
        reserved: 0,
    };
    // Activations lie by position.
    let shrink_act = MoePrefillShrinkArgs {
        x: act,
        perm: DevicePtr::NULL,
        x_pitch: down.x_pitch,
        tables: down.tables,
        k: down.inner,
        // The product in front has begun behind the routing.
        needs: needs::X,
        ..shrink_x
    };
    let shrink_grid = heuristics::prefill_shrink(experts.lora_tile_count);
    let shrink = |s: &mut CudaStream, args: &MoePrefillShrinkArgs| {
        launch(cuda, s, MOE_PREFILL_SHRINK, dtype, shrink_grid, args)
    };
    let product = |s: &mut CudaStream, entries: [Entry<MoePrefillArgs>; 4], args| {
        let [few, some, many, warps] = entries;
        if how.warpgroups {
            let entry = match how.shape {
                PrefillShape::Few => few,
                PrefillShape::Some => some,
                PrefillShape::Many => many,
            };
            return launch(cuda, s, entry, dtype, how.product, args);
        }
        launch_variant(cuda, s, (warps, dtype, Variant::Warps(how.warps)), how.product, args)
    };
    let gate_up_entries = [
        MOE_PREFILL_FEW_GATE_UP,
        MOE_PREFILL_SOME_GATE_UP,
        MOE_PREFILL_GATE_UP,
        MOE_PREFILL_MMA_GATE_UP,
    ];
    let down_entries =
        [MOE_PREFILL_FEW_DOWN, MOE_PREFILL_SOME_DOWN, MOE_PREFILL_DOWN, MOE_PREFILL_MMA_DOWN];
    let shrinks = experts.lora_tile_count > 0;
    let between = shrinks && how.shrinks_between(pairs, routing.experts, experts.lora_tile_count);
    // The first shrink has the gather in its launch where experts have many tokens, or the second both products.
    let joined = how.warpgroups && shrinks && (between || how.shape == PrefillShape::Many);
    if how.warpgroups {
        let alone = heuristics::prefill_gather(pairs);
        let gather = MoePrefillGatherArgs {
            x: of.x,
            perm: of.perm,
            out: gathered,
            x_pitch: of.x_pitch,
            pairs: int(pairs)?,
            hidden: of.hidden,
            top_k: of.top_k,
            reserved: 0,
        };
        if joined {
            let shrink = MoePrefillShrinkArgs { needs: needs::ALL, ..shrink_x };
            let args = MoePrefillGatherShrinkArgs { gather, shrink };
            launch(cuda, s, MOE_PREFILL_GATHER_SHRINK, dtype, shrink_grid, &args)?;
        } else {
            launch(cuda, s, MOE_PREFILL_GATHER, dtype, alone, &gather)?;
        }
    }
    if !joined {
        shrink(s, &shrink_x)?;
    }
    let both = match how.shape {
        PrefillShape::Few if !lora => Some(MOE_PREFILL_FEW),
        PrefillShape::Some if !lora => Some(MOE_PREFILL_SOME),
        PrefillShape::Many if !lora => Some(MOE_PREFILL),
        PrefillShape::Some if between => Some(MOE_PREFILL_SOME_LORA),
        PrefillShape::Many if between => Some(MOE_PREFILL_LORA),
        _ => None,
    };
    let at_once = match both {
        Some(entry) if how.warpgroups => runs_at_once(cuda, s, (entry, dtype), how.product)?,
        _ => false,
    };
    match both {
        Some(entry) if at_once => {
            launch(cuda, s, entry, dtype, how.product, &MoePrefillBothArgs { gate_up, down })?;
        }
        _ => {
            product(s, gate_up_entries, &gate_up)?;
            shrink(s, &shrink_act)?;
            product(s, down_entries, &down)?;
        }
    }
    let combine = experts.combine(y)?;
    launch(cuda, s, MOE_COMBINE, dtype, heuristics::combine(tokens, hidden), &combine)
}
