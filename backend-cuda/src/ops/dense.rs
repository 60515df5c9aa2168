//! Dense projections, plain and with adapters. Both run one base product: the kernel is chosen by sizes
//! and types alone, and deltas are added to its f32 sums.

use amphora_cuda_kernels::args::{
    DenseArgs, DenseClusterArgs, DenseShrinkArgs, LinearArgs, LoraArgs, LoraLinearArgs,
    LoraShrinkArgs, aligned,
};
use amphora_cuda_kernels::{
    DENSE_SHRINK, DENSE_SHRINK_MANY, DevicePtr, LINEAR, LINEAR_CLUSTER, LINEAR_FINISH,
    LINEAR_NARROW, LINEAR_STREAM_8, LINEAR_STREAM_16, LINEAR_WIDE, LORA_LINEAR,
};
use amphora_hal::ops::{Linear, LoraLinear};
use amphora_hal::{DType, OpKind, Result, Scheme};

use super::shrink::Shrink;
use super::{dense_group, dense_tiles, lora_args};
use crate::device::{Cuda, CudaStream};
use crate::driver::cublaslt::Shape;
use crate::driver::{Geometry, Tiled};
use crate::heuristics::dense::{
    CLUSTER_BOX, Deltas, Operands, Path, Product, Ring, Stream, SumsPlace, Tile, cluster_geometry,
    cluster_ring, cluster_shares_factors, finish, stream_room, sums_pieces, tiles_geometry,
};
use crate::heuristics::tuned::{dense_path, dense_shrink, shrink_in_groups};
use crate::heuristics::{self, COUNTER_BYTES};
use crate::launch::{
    Workspace, int, launch, launch_library, optional, pitch, ptr, runs_at_once, weight_type,
};

fn linear_args(kind: OpKind, op: &Linear<'_, Cuda>) -> Result<LinearArgs> {
    Ok(LinearArgs {
        x: ptr(op.x),
        weight: ptr(op.weight.data()),
        bias: optional(op.bias),
        out: ptr(op.out),
        x_pitch: pitch(op.x)?,
        out_pitch: pitch(op.out)?,
        tokens: int(op.x.dims()[0])?,
        n: int(op.weight.n())?,
        k: int(op.weight.k())?,
        weight_type: weight_type(kind, op.x.dtype(), op.weight.scheme())?,
        out_f32: i32::from(op.out.dtype() == DType::F32),
        aligned: 0,
    })
}

/// Whether the rows of a matrix start at multiples of `bytes`.
fn rows_at(address: DevicePtr, pitch: i64, element: usize, bytes: u64) -> bool {
    address.0.is_multiple_of(bytes) && (pitch.unsigned_abs() * element as u64).is_multiple_of(bytes)
}

/// A product on tensor cores, or on the exact path.
struct Planned {
    product: Product,
    path: Path,
    args: LinearArgs,
    dtype: DType,
}

fn plan(cuda: &Cuda, kind: OpKind, op: &Linear<'_, Cuda>) -> Result<Planned> {
    let mut args = linear_args(kind, op)?;
    let (dtype, size) = (op.x.dtype(), op.x.dtype().size());
    let [tokens, n, k] = [op.x.dims()[0], op.weight.n(), op.weight.k()];
    let operands = if dtype == DType::F32 || op.weight.scheme() != Scheme::Dense(dtype) {
        Operands::Exact
    } else if rows_at(args.x, args.x_pitch, size, 16)
        && rows_at(args.weight, i64::from(args.k), size, 16)
    {
        args.aligned |= aligned::OPERANDS;
        Operands::HalfAligned
    } else {
        Operands::Half
    };
    let out = op.out.dtype().size();
    if rows_at(args.out, args.out_pitch, out, 2 * out as u64) {
        args.aligned |= aligned::PAIRS;
    }
    if rows_at(args.out, args.out_pitch, out, 8 * out as u64) && out == size && n.is_multiple_of(8)
    {
        args.aligned |= aligned::ROWS;
    }
    let dense = args.out_pitch == i64::from(args.n) && rows_at(args.out, args.out_pitch, out, 16);
    let whole = args.out_f32 == 1 && dense;
    let place = if whole { SumsPlace::Outputs } else { SumsPlace::Workspace };
    let product = Product { tokens, n, k, operands, place };
    let shape = Shape { m: tokens, n, k, x_pitch: args.x_pitch.unsigned_abs() as usize, dtype };
    let library = || cuda.products().filter(|library| library.takes(shape)).map(|_| shape);
    let path = dense_path(&product, dtype, library, (cuda.limits(), cuda.tuning()));
    Ok(Planned { product, path, args, dtype })
}

/// The product on tensor cores; `false` if it is the exact path's.
fn launch_product(
    cuda: &Cuda,
    s: &mut CudaStream,
    workspace: &mut Workspace,
    planned: &Planned,
    args: DenseArgs,
) -> Result<bool> {
    let dtype = planned.dtype;
    let deltas = if args.lora.slice_count > 0 { Deltas::Yes } else { Deltas::No };
    match planned.path {
        Path::Exact => return Ok(false),
        Path::Stream(stream, geometry) => {
            let entry = match stream {
                Stream::Eight => LINEAR_STREAM_8,
                Stream::Sixteen => LINEAR_STREAM_16,
            };
            let room = match deltas {
                Deltas::No => 0,
                Deltas::Yes => stream_room(geometry, cuda.limits()),
            };
            let args = DenseArgs { factor_bytes: int(room)?, ..args };
            let geometry = geometry.shared(geometry.shared + room as u32);
            launch(cuda, s, entry, dtype, geometry, &args)?;
        }
        Path::Cluster(parts) => {
            let product = &planned.product;
            let (geometry, ring) = cluster_launch(cuda, product, parts, deltas);
            let map = |start, rows, pitch: usize, box_rows| {
                let (dims, box_dims) = ([product.k, rows], [CLUSTER_BOX[0], box_rows]);
                Tiled { dtype, start, dims, strides: [0, pitch * dtype.size()], box_dims }.encode()
            };
            let x_rows = product.tokens.next_multiple_of(8);
            let x_pitch = args.base.x_pitch.unsigned_abs() as usize;
            let args = DenseClusterArgs {
                weight: map(args.base.weight, product.n, product.k, CLUSTER_BOX[1])?,
                x: map(args.base.x, product.tokens, x_pitch, x_rows)?,
                of: args,
                x_rows: int(x_rows)?,
                stages: int(ring.stages)?,
                streams: i32::from(ring.streams),
            };
            launch(cuda, s, LINEAR_CLUSTER, dtype, geometry, &args)?;
        }
        Path::Group(tile) => {
            dense_group::product(cuda, s, (&planned.product, dtype, tile), args)?;
        }
        Path::Tiles(tile, parts) => {
            let geometry = tiles_geometry(&planned.product, tile, parts, deltas, cuda.limits());
            let args = DenseArgs { parts: int(parts)?, ..args };
            let entry = match tile {
                Tile::Narrow => LINEAR_NARROW,
                Tile::Wide => LINEAR_WIDE,
            };
            launch(cuda, s, entry, dtype, geometry, &args)?;
        }
        Path::Tiling(tiling) => {
            let product = (&planned.product, dtype, tiling);
            dense_tiles::run(cuda, s, workspace, product, args)?;
        }
        Path::Library(shape) => {
            let Product { tokens, n, place, .. } = planned.product;
            let [bytes, own] = sums_pieces(tokens, n);
            let sums = match place {
                SumsPlace::Workspace => workspace.take(bytes)?,
                SumsPlace::Outputs => args.base.out,
            };
            let places = [args.base.x, args.base.weight, sums, workspace.take(own)?];
            launch_library(cuda, s, shape, places)?;
            let finished = deltas == Deltas::No && args.base.bias == DevicePtr::NULL;
            if place == SumsPlace::Outputs && finished {
                return Ok(true);
            }
            let args = DenseArgs { sums, ..args };
            let geometry = finish(&planned.product, deltas);
            launch(cuda, s, LINEAR_FINISH, dtype, geometry, &args)?;
        }
    }
    Ok(true)
}

/// The counters of the streaming kernels: a quarter of the stream's, which expert products leave alone.
fn stream_counters(workspace: &Workspace) -> Result<DevicePtr> {
    Ok(DevicePtr(workspace.counters()?.0 + COUNTER_BYTES as u64 / 4))
}

fn cluster_launch(
    cuda: &Cuda,
    product: &Product,
    parts: usize,
    deltas: Deltas,
) -> (Geometry, Ring) {
    let ring = cluster_ring(product, parts, cuda.limits());
    let ring = if deltas == Deltas::Yes { ring.with_deltas() } else { ring };
    (cluster_geometry(product, parts, ring), ring)
}

/// Whether the product behind a shrink waits for it before it reads x.
fn begins_before_x(cuda: &Cuda, planned: &Planned) -> bool {
    let Path::Cluster(parts) = planned.path else { return false };
    !cluster_ring(&planned.product, parts, cuda.limits()).streams
}

/// Whether a cluster's blocks make their shrunk rows. Those wait for each other, so all must run at once; and
/// the rows of A are shared out among the tiles of outputs, of which a router's has one.
fn shrinks_inside(cuda: &Cuda, s: &CudaStream, planned: &Planned) -> Result<bool> {
    let Path::Cluster(parts) = planned.path else { return Ok(false) };
    let (geometry, ring) = cluster_launch(cuda, &planned.product, parts, Deltas::Yes);
    if !cluster_shares_factors(&planned.product, ring) {
        return Ok(false);
    }
    runs_at_once(cuda, s, (LINEAR_CLUSTER, planned.dtype), geometry)
}

fn plain(base: LinearArgs) -> DenseArgs {
    let lora = LoraArgs::NONE;
    DenseArgs {
        base,
        lora,
        slot: DevicePtr::NULL,
        perm: DevicePtr::NULL,
        sums: DevicePtr::NULL,
        ready: DevicePtr::NULL,
        parts: 1,
        group: 1,
        factor_bytes: 0,
    }
}

pub(super) fn linear(cuda: &Cuda, s: &mut CudaStream, op: Linear<'_, Cuda>) -> Result<()> {
    let planned = plan(cuda, OpKind::Linear, &op)?;
    let mut workspace = Workspace::of(s);
    if launch_product(cuda, s, &mut workspace, &planned, plain(planned.args))? {
        return Ok(());
    }
    let grid = heuristics::linear(planned.product.tokens, planned.product.n);
    launch(cuda, s, LINEAR, op.x.dtype(), grid, &planned.args)
}

pub(super) fn lora_linear(cuda: &Cuda, s: &mut CudaStream, op: LoraLinear<'_, Cuda>) -> Result<()> {
    let planned = plan(cuda, OpKind::LoraLinear, &op.base)?;
    let (product, base) = (planned.product, planned.args);
    let (tokens, dtype) = (product.tokens, op.base.x.dtype());
    let (perm, tiles) = (op.segments.perm().tensor(), op.segments.tiles().tensor());
    let mut workspace = Workspace::of(s);
    let shrunk = workspace.take(heuristics::shrunk_bytes(tokens))?;
    let lora = lora_args(OpKind::LoraLinear, op.lora, op.slices, shrunk)?;
    if planned.path != Path::Exact {
        if tiles.dims()[0] == 0 || op.slices.is_empty() {
            return launch_product(cuda, s, &mut workspace, &planned, plain(base)).map(|_| ());
        }
        let slot = ptr(op.segments.slot().tensor());
        let with_deltas = DenseArgs { lora, slot, ..plain(base) };
        if let Path::Stream(..) = planned.path {
            let args = DenseArgs { ready: stream_counters(&workspace)?, ..with_deltas };
            return launch_product(cuda, s, &mut workspace, &planned, args).map(|_| ());
        }
        if shrinks_inside(cuda, s, &planned)? {
            let [ready, shrunk] = workspace.dense_cleared()?;
            let args = DenseArgs { ready, lora: LoraArgs { shrunk, ..lora }, ..with_deltas };
            return launch_product(cuda, s, &mut workspace, &planned, args).map(|_| ());
        }
        let in_groups = match planned.path {
            Path::Group(tile) => {
                shrink_in_groups((&product, tile), dtype, (cuda.limits(), cuda.tuning()))
            }
            _ => None,
        };
        if let Some(shrink) = in_groups {
            let by_slot = DenseArgs { perm: ptr(perm), ..with_deltas };
            dense_group::shrink(cuda, s, shrink, (&product, dtype, by_slot))?;
            return launch_product(cuda, s, &mut workspace, &planned, with_deltas).map(|_| ());
        }
        let counts = [tiles.dims()[0], op.slices.len()];
        let shrink = dense_shrink(&product, dtype, counts, cuda.tuning());
        let whole = base.aligned & aligned::OPERANDS != 0;
        let (entry, (geometry, block_tiles)) = match shrink.many(cuda.limits()).filter(|_| whole) {
            Some(many) => (DENSE_SHRINK_MANY, many),
            None => (DENSE_SHRINK, (shrink.geometry, 1)),
        };
        let args = DenseShrinkArgs {
            x: base.x,
            tiles: ptr(tiles),
            perm: ptr(perm),
            lora,
            x_pitch: base.x_pitch,
            k: base.k,
            aligned: base.aligned,
            rank_rows: int(shrink.rank_rows)?,
            early: i32::from(begins_before_x(cuda, &planned)),
            tile_count: int(tiles.dims()[0])?,
            block_tiles: int(block_tiles)?,
        };
        launch(cuda, s, entry, dtype, geometry, &args)?;
        let args = DenseArgs { perm: ptr(perm), ..with_deltas };
        return launch_product(cuda, s, &mut workspace, &planned, args).map(|_| ());
    }
    let shrink = LoraShrinkArgs {
        x: base.x,
        tiles: ptr(tiles),
        perm: ptr(perm),
        pair_weights: DevicePtr::NULL,
        lora,
        x_pitch: base.x_pitch,
        k: base.k,
        tile_words: 3,
        pairs_per_row: 1,
        parts: 1,
        partials: DevicePtr::NULL,
        part_pitch: 0,
    };
    let rows = Shrink { dtype, tokens, positions: tokens, tiles: tiles.dims()[0] };
    rows.run(cuda, s, &workspace, &shrink)?;
    let args = LoraLinearArgs {
        base,
        lora,
        perm: ptr(perm),
        tiles: ptr(tiles),
        tile_count: int(tiles.dims()[0])?,
        reserved: 0,
    };
    let grid = heuristics::linear(tokens, product.n);
    launch(cuda, s, LORA_LINEAR, dtype, grid, &args)
}
