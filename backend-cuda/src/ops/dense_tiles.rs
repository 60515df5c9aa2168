//! Dense products by tiles in another way than the heuristic has them: other orders of blocks, nothing
//! masked along k, sums that another kernel finishes with bias and deltas.

use amphora_cuda_kernels::args::{DenseArgs, LoraArgs, aligned};
use amphora_cuda_kernels::{DevicePtr, LINEAR_CLEAR, LINEAR_FINISH, LINEAR_NARROW, LINEAR_WIDE};
use amphora_hal::{DType, Result};

use crate::device::{Cuda, CudaStream};
use crate::driver::Geometry;
use crate::heuristics::dense::{
    Deltas, Product, Sums, Tile, Tiling, clear, finish, sums_pieces, tiles_geometry,
};
use crate::jit::Variant;
use crate::launch::{Workspace, int, launch, launch_variant};

pub(super) fn run(
    cuda: &Cuda,
    s: &mut CudaStream,
    workspace: &mut Workspace,
    (product, dtype, tiling): (&Product, DType, Tiling),
    args: DenseArgs,
) -> Result<()> {
    let Tiling { tile, parts, group, even_k, sums } = tiling;
    let limits = cuda.limits();
    let entry = match tile {
        Tile::Narrow => LINEAR_NARROW,
        Tile::Wide => LINEAR_WIDE,
    };
    let launch_tiles = |s: &mut CudaStream, geometry: Geometry, args: &DenseArgs| {
        let variant = (entry, dtype, Variant::Tiles { even_k });
        launch_variant(cuda, s, variant, geometry, args)
    };
    let args = DenseArgs { parts: int(parts)?, group: int(group)?, ..args };
    let deltas = if args.lora.slice_count > 0 { Deltas::Yes } else { Deltas::No };
    if sums == Sums::Inside {
        let geometry = tiles_geometry(product, tile, parts, deltas, limits);
        return launch_tiles(s, geometry, &args);
    }
    let [bytes, _] = sums_pieces(product.tokens, product.n);
    let at = workspace.take(bytes)?;
    let alone =
        DenseArgs { lora: LoraArgs::NONE, slot: DevicePtr::NULL, perm: DevicePtr::NULL, ..args };
    let geometry = tiles_geometry(product, tile, parts, Deltas::No, limits);
    if sums == Sums::Atomic {
        let alone = DenseArgs { sums: at, ..alone };
        launch(cuda, s, LINEAR_CLEAR, dtype, clear(product, limits), &alone)?;
        launch_tiles(s, Geometry { cluster: 1, ..geometry }, &alone)?;
    } else {
        let mut alone = DenseArgs { sums: DevicePtr::NULL, ..alone };
        alone.base.out = at;
        alone.base.out_pitch = i64::from(alone.base.n);
        alone.base.out_f32 = 1;
        alone.base.bias = DevicePtr::NULL;
        alone.base.aligned = (alone.base.aligned & aligned::OPERANDS) | aligned::PAIRS;
        launch_tiles(s, geometry, &alone)?;
    }
    let args = DenseArgs { sums: at, parts: 1, group: 1, ..args };
    launch(cuda, s, LINEAR_FINISH, dtype, finish(product, deltas), &args)
}
