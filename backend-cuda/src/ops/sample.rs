//! Drawing tokens.

use amphora_cuda_kernels::SAMPLE;
use amphora_cuda_kernels::args::SampleArgs;
use amphora_hal::ops::Sample;
use amphora_hal::{DType, Result};

use crate::device::{Cuda, CudaStream};
use crate::heuristics::per_block;
use crate::launch::{int, launch, ptr};

pub(super) fn sample(cuda: &Cuda, s: &mut CudaStream, op: Sample<'_, Cuda>) -> Result<()> {
    let sequences = op.result.dims()[0];
    let args = SampleArgs {
        logits: ptr(op.logits),
        sampling: ptr(op.plan.sampling().tensor()),
        sample_slot: ptr(op.plan.sample_slot().tensor()),
        table: ptr(op.table.index().tensor()),
        result: ptr(op.result),
        vocab: int(op.logits.dims()[1])?,
        reserved: 0,
    };
    launch(cuda, s, SAMPLE, DType::F32, per_block(sequences), &args)
}
