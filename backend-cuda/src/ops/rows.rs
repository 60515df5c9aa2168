//! Rows moved by index.

use amphora_cuda_kernels::args::{EmbedArgs, GatherRowsArgs, WriteTokensArgs};
use amphora_cuda_kernels::{EMBED, GATHER_ROWS, WRITE_TOKENS};
use amphora_hal::ops::{Embed, GatherRows, WriteTokens};
use amphora_hal::{DType, Result};

use crate::device::{Cuda, CudaStream};
use crate::heuristics::{per_block, per_thread};
use crate::launch::{int, launch, pitch, ptr};

pub(super) fn write_tokens(
    cuda: &Cuda,
    s: &mut CudaStream,
    op: WriteTokens<'_, Cuda>,
) -> Result<()> {
    let tokens = op.prompt.tensor().dims()[0];
    let args = WriteTokensArgs {
        prompt: ptr(op.prompt.tensor()),
        table: ptr(op.table.index().tensor()),
        sequences: int(op.table.sequences())?,
        tokens: int(tokens)?,
    };
    let threads = WRITE_TOKENS.id().kernel().threads as usize;
    launch(cuda, s, WRITE_TOKENS, DType::F32, per_thread(tokens, threads).overlapped(), &args)
}

pub(super) fn embed(cuda: &Cuda, s: &mut CudaStream, op: Embed<'_, Cuda>) -> Result<()> {
    let [tokens, width] = [op.out.dims()[0], op.out.dims()[1]];
    let args = EmbedArgs {
        index: ptr(op.index.tensor()),
        table: ptr(op.table.index().tensor()),
        weight: ptr(op.weight),
        out: ptr(op.out),
        out_pitch: pitch(op.out)?,
        tokens: int(tokens)?,
        width: int(width)?,
    };
    launch(cuda, s, EMBED, op.out.dtype(), per_block(tokens).overlapped(), &args)
}

pub(super) fn gather_rows(cuda: &Cuda, s: &mut CudaStream, op: GatherRows<'_, Cuda>) -> Result<()> {
    let [count, width] = [op.out.dims()[0], op.out.dims()[1]];
    let args = GatherRowsArgs {
        x: ptr(op.x),
        rows: ptr(op.rows.tensor()),
        out: ptr(op.out),
        x_pitch: pitch(op.x)?,
        out_pitch: pitch(op.out)?,
        count: int(count)?,
        width: int(width)?,
    };
    launch(cuda, s, GATHER_ROWS, op.out.dtype(), per_block(count).overlapped(), &args)
}
