//! Both expert products for few tokens: three launches, the shrinks inside the products.

use amphora_cuda_kernels::args::{MoeDownArgs, MoeStreamArgs};
use amphora_cuda_kernels::{
    DevicePtr, Entry, MOE_COMBINE, STREAM_DOWN_8, STREAM_DOWN_16, STREAM_DOWN_LORA_8,
    STREAM_DOWN_LORA_16, STREAM_GATE_UP_8, STREAM_GATE_UP_16, STREAM_GATE_UP_LORA_8,
    STREAM_GATE_UP_LORA_16,
};
use amphora_hal::Result;

use super::Experts;
use crate::device::{Cuda, CudaStream};
use crate::heuristics::{self, MoeBytes, MoeStream, STREAM_SHRUNK};
use crate::jit::Variant;
use crate::launch::{Workspace, int, launch, resolve};

/// The entries of gate_up and of down.
fn entries(lora: bool, pass: usize) -> [Entry<MoeStreamArgs>; 2] {
    match (lora, pass) {
        (false, 8) => [STREAM_GATE_UP_8, STREAM_DOWN_8],
        (false, _) => [STREAM_GATE_UP_16, STREAM_DOWN_16],
        (true, 8) => [STREAM_GATE_UP_LORA_8, STREAM_DOWN_LORA_8],
        (true, _) => [STREAM_GATE_UP_LORA_16, STREAM_DOWN_LORA_16],
    }
}

pub(super) fn run(
    cuda: &Cuda,
    s: &mut CudaStream,
    experts: &Experts<'_>,
    tiles: MoeStream,
) -> Result<()> {
    let &Experts { pairs, hidden, inner, dtype, tokens, .. } = experts;
    let with_lora = experts.adapters.is_some();
    let pieces = heuristics::moe_pieces(MoeBytes {
        pairs,
        inner,
        hidden,
        element: dtype.size(),
        lora: false,
    });
    let mut workspace = Workspace::of(s);
    let [act, y] = [workspace.take(pieces[0])?, workspace.take(pieces[1])?];
    // The state, and the shrunk rows of both products; each clears the other's.
    let state = workspace.counters()?;
    let shrunk = workspace.cleared()?;
    let down_shrunk = DevicePtr(shrunk.0 + STREAM_SHRUNK[0] as u64);
    let of = experts.gate_up(act, shrunk)?;
    let gate_up = MoeStreamArgs {
        x: of.x,
        weight: of.weight,
        bias: of.bias,
        out: act,
        perm: of.perm,
        tiles: of.tiles,
        lora_tiles: of.lora_tiles,
        clear: down_shrunk,
        state,
        lora: of.lora,
        x_pitch: of.x_pitch,
        tile_count: int(experts.tile_count)?,
        lora_tile_count: of.lora_tile_count,
        n: int(2 * inner)?,
        top_k: of.top_k,
        pairs: int(pairs)?,
        activation: of.activation,
        limit: of.limit,
        alpha: of.alpha,
    };
    let MoeDownArgs { weight, bias, lora, .. } = experts.down(act, y, down_shrunk)?;
    let down = MoeStreamArgs {
        x: act,
        weight,
        bias,
        out: y,
        clear: shrunk,
        lora,
        x_pitch: int(inner)?.into(),
        n: int(hidden)?,
        ..gate_up
    };
    let [gate_up_entry, down_entry] = entries(with_lora, tiles.pass);
    let grid = heuristics::streamed(cuda.limits());
    // Both or neither: shrunk rows are their own flags, which down alone clears.
    let kernels = [
        resolve(cuda, (gate_up_entry, dtype, Variant::Stream(tiles.gate_up)))?,
        resolve(cuda, (down_entry, dtype, Variant::Stream(tiles.down)))?,
    ];
    for (kernel, args) in kernels.iter().zip([&gate_up, &down]) {
        kernel.launch(cuda, s, grid, args)?;
    }
    let combine = experts.combine(y)?;
    launch(cuda, s, MOE_COMBINE, dtype, heuristics::combine(tokens, hidden), &combine)
}
