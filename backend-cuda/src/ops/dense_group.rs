//! Dense products of a prompt's rows on Hopper, by tensor maps and warpgroup products, and the shrink in front of
//! their deltas.

use amphora_cuda_kernels::args::{DenseArgs, DenseClusterArgs, TensorMap};
use amphora_cuda_kernels::{
    DENSE_SHRINK_GROUP, DevicePtr, LINEAR_GROUP_FLAT, LINEAR_GROUP_LARGE, LINEAR_GROUP_SLIM,
    LINEAR_GROUP_SQUARE,
};
use amphora_hal::{DType, Result};

use crate::device::{Cuda, CudaStream};
use crate::driver::Tiled;
use crate::heuristics::dense::{GroupShrink, GroupTile, Product, SHRINK_BOX};
use crate::launch::{int, launch};

/// Rows of `k` numbers, one every `pitch`, and their boxes.
fn rows(
    dtype: DType,
    start: DevicePtr,
    [k, rows, pitch]: [usize; 3],
    box_dims: [usize; 2],
) -> Result<TensorMap> {
    let strides = [0, pitch * dtype.size()];
    Tiled { dtype, start, dims: [k, rows], strides, box_dims }.encode()
}

pub(super) fn product(
    cuda: &Cuda,
    s: &mut CudaStream,
    (product, dtype, tile): (&Product, DType, GroupTile),
    args: DenseArgs,
) -> Result<()> {
    if product.tokens == 0 {
        return Ok(());
    }
    let entry = match tile {
        GroupTile::Flat => LINEAR_GROUP_FLAT,
        GroupTile::Slim => LINEAR_GROUP_SLIM,
        GroupTile::Square => LINEAR_GROUP_SQUARE,
        GroupTile::Large => LINEAR_GROUP_LARGE,
    };
    let [of_weight, of_x] = tile.boxes();
    let &Product { n, k, .. } = product;
    let pitch = args.base.x_pitch.unsigned_abs() as usize;
    let args = DenseClusterArgs {
        weight: rows(dtype, args.base.weight, [k, n, k], of_weight)?,
        x: rows(dtype, args.base.x, [k, product.tokens, pitch], of_x)?,
        of: args,
        x_rows: int(of_x[1])?,
        stages: 0,
        streams: 0,
    };
    launch(cuda, s, entry, dtype, tile.geometry(product, cuda.limits()), &args)
}

/// Shrunk rows for such a product, whose arguments are `args` with the permutation.
pub(super) fn shrink(
    cuda: &Cuda,
    s: &mut CudaStream,
    GroupShrink { geometry, ring }: GroupShrink,
    (product, dtype, args): (&Product, DType, DenseArgs),
) -> Result<()> {
    let pitch = args.base.x_pitch.unsigned_abs() as usize;
    let args = DenseClusterArgs {
        weight: TensorMap::default(),
        x: rows(dtype, args.base.x, [product.k, product.tokens, pitch], SHRINK_BOX)?,
        of: args,
        x_rows: int(SHRINK_BOX[1])?,
        stages: int(ring.stages)?,
        streams: i32::from(ring.streams),
    };
    launch(cuda, s, DENSE_SHRINK_GROUP, dtype, geometry, &args)
}
