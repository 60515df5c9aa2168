//! The shrink of every type and shape, whose k may be split among blocks.

use amphora_cuda_kernels::args::LoraShrinkArgs;
use amphora_cuda_kernels::{DevicePtr, LORA_SHRINK, LORA_SHRINK_CLEAR, LORA_SHRINK_SUM};
use amphora_hal::{DType, Result};

use crate::device::{Cuda, CudaStream};
use crate::heuristics::tuned::{Split, shrink_split};
use crate::heuristics::{self, shrunk_bytes};
use crate::launch::{Workspace, int, launch};
use crate::tuning::operators::Order;

/// A shrink's rows.
pub(super) struct Shrink {
    pub(super) dtype: DType,
    /// Rows of the step's bucket.
    pub(super) tokens: usize,
    /// Rows that are shrunk.
    pub(super) positions: usize,
    /// Entries of the list of tiles.
    pub(super) tiles: usize,
}

impl Shrink {
    /// Puts it on the stream, with what meets its parts. Partial sums lie behind
    /// what is taken of the workspace.
    pub(super) fn run(
        &self,
        cuda: &Cuda,
        s: &mut CudaStream,
        workspace: &Workspace,
        args: &LoraShrinkArgs,
    ) -> Result<()> {
        let &Shrink { dtype, tokens, positions, tiles } = self;
        let slices = args.lora.slice_count.unsigned_abs() as usize;
        if tiles == 0 || slices == 0 {
            return Ok(());
        }
        let sizes = [tokens, positions, args.k.unsigned_abs() as usize];
        let split = shrink_split(sizes, dtype, cuda.tuning());
        let Split { parts, order } = split;
        let partials = match split.partial_rows(positions) {
            0 => DevicePtr::NULL,
            rows => workspace.rest(shrunk_bytes(rows))?,
        };
        let part_pitch = shrunk_bytes(positions) as i64 / 4;
        let args = &LoraShrinkArgs { parts: int(parts)?, partials, part_pitch, ..*args };
        let (meeting, grid) =
            (heuristics::shrink_meeting(tiles, slices), heuristics::shrink(tiles, slices, parts));
        if parts > 1 && order == Order::Atomic {
            launch(cuda, s, LORA_SHRINK_CLEAR, dtype, meeting, args)?;
        }
        launch(cuda, s, LORA_SHRINK, dtype, grid, args)?;
        if parts > 1 && order == Order::Ordered {
            launch(cuda, s, LORA_SHRINK_SUM, dtype, meeting, args)?;
        }
        Ok(())
    }
}
