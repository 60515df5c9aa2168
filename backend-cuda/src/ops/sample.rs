//! Drawing tokens, and their log-probabilities.

use amphora_cuda_kernels::args::{LogprobsArgs, SampleArgs};
use amphora_cuda_kernels::{LOGPROBS, SAMPLE};
use amphora_hal::ops::{Logprobs, Sample};
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
        edit_start: ptr(op.plan.edit_start().tensor()),
        edits: ptr(op.plan.edits().tensor()),
        table: ptr(op.table.index().tensor()),
        result: ptr(op.result),
        vocab: int(op.logits.dims()[1])?,
        reserved: 0,
    };
    launch(cuda, s, SAMPLE, DType::F32, per_block(sequences), &args)
}

pub(super) fn logprobs(cuda: &Cuda, s: &mut CudaStream, op: Logprobs<'_, Cuda>) -> Result<()> {
    let rows = op.out.dims()[0];
    let args = LogprobsArgs {
        logits: ptr(op.logits),
        target: ptr(op.plan.logprob_target().tensor()),
        best: ptr(op.plan.logprob_best().tensor()),
        sample_slot: ptr(op.plan.sample_slot().tensor()),
        table: ptr(op.table.index().tensor()),
        out: ptr(op.out),
        vocab: int(op.logits.dims()[1])?,
        reserved: 0,
    };
    launch(cuda, s, LOGPROBS, DType::F32, per_block(rows), &args)
}
