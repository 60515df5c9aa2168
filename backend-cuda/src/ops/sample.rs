//! Drawing tokens, and their log-probabilities.

use amphora_cuda_kernels::args::{LogprobsArgs, SampleArgs};
use amphora_cuda_kernels::{LOGPROBS_FINISH, LOGPROBS_SURVEY, SAMPLE_FINISH, SAMPLE_SURVEY};
use amphora_hal::ops::{Logprobs, Sample};
use amphora_hal::{DType, Error, OpKey, OpKind, Result};

use crate::device::{Cuda, CudaStream};
use crate::heuristics::{
    candidates, chunks, logit_chunks, logprob_pieces, per_block, sample_pieces,
};
use crate::launch::{Workspace, int, launch, ptr};

const TOO_MANY_TOKENS: &str = "a vocabulary of more chunks than a row has candidates";

pub(super) fn sample(cuda: &Cuda, s: &mut CudaStream, op: Sample<'_, Cuda>) -> Result<()> {
    let (sequences, vocab) = (op.result.dims()[0], op.logits.dims()[1]);
    let of_chunk = candidates(vocab).ok_or(Error::Unsupported {
        key: OpKey::new(OpKind::Sample, DType::F32),
        reason: TOO_MANY_TOKENS,
    })?;
    let pieces = sample_pieces(sequences, vocab);
    let mut workspace = Workspace::of(s);
    let args = SampleArgs {
        logits: ptr(op.logits),
        sampling: ptr(op.plan.sampling().tensor()),
        sample_slot: ptr(op.plan.sample_slot().tensor()),
        edit_start: ptr(op.plan.edit_start().tensor()),
        edits: ptr(op.plan.edits().tensor()),
        table: ptr(op.table.index().tensor()),
        result: ptr(op.result),
        partials: workspace.take(pieces[0])?,
        keys: workspace.take(pieces[1])?,
        edited: workspace.take(pieces[2])?,
        vocab: int(vocab)?,
        chunks: int(chunks(vocab))?,
        candidates: int(of_chunk)?,
        reserved: 0,
    };
    let survey = logit_chunks(sequences, vocab).overlapped();
    launch(cuda, s, SAMPLE_SURVEY, DType::F32, survey, &args)?;
    launch(cuda, s, SAMPLE_FINISH, DType::F32, per_block(sequences).overlapped(), &args)
}

pub(super) fn logprobs(cuda: &Cuda, s: &mut CudaStream, op: Logprobs<'_, Cuda>) -> Result<()> {
    let (rows, vocab) = (op.out.dims()[0], op.logits.dims()[1]);
    let pieces = logprob_pieces(rows, vocab);
    let mut workspace = Workspace::of(s);
    let args = LogprobsArgs {
        logits: ptr(op.logits),
        target: ptr(op.plan.logprob_target().tensor()),
        best: ptr(op.plan.logprob_best().tensor()),
        sample_slot: ptr(op.plan.sample_slot().tensor()),
        table: ptr(op.table.index().tensor()),
        out: ptr(op.out),
        partials: workspace.take(pieces[0])?,
        keys: workspace.take(pieces[1])?,
        vocab: int(vocab)?,
        chunks: int(chunks(vocab))?,
    };
    let survey = logit_chunks(rows, vocab).overlapped();
    launch(cuda, s, LOGPROBS_SURVEY, DType::F32, survey, &args)?;
    launch(cuda, s, LOGPROBS_FINISH, DType::F32, per_block(rows).overlapped(), &args)
}
