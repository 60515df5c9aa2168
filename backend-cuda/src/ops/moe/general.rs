//! Both expert products for every shape and type, simply: one launch for each step of the formula.

use amphora_cuda_kernels::args::{LoraArgs, LoraShrinkArgs};
use amphora_cuda_kernels::{
    DevicePtr, LORA_SHRINK, MOE_COMBINE, MOE_DOWN, MOE_DOWN_LORA, MOE_GATE_UP, MOE_GATE_UP_LORA,
};
use amphora_hal::Result;

use super::Experts;
use crate::device::{Cuda, CudaStream};
use crate::heuristics::{self, MoeBytes};
use crate::launch::{Workspace, launch};

/// Both products and the sum over a token's experts, with a shrink in front of each product if there
/// are adapters.
pub(super) fn run(cuda: &Cuda, s: &mut CudaStream, experts: &Experts<'_>) -> Result<()> {
    let &Experts { pairs, hidden, inner, dtype, tokens, .. } = experts;
    let lora = experts.adapters.is_some();
    let pieces =
        heuristics::moe_pieces(MoeBytes { pairs, inner, hidden, element: dtype.size(), lora });
    let mut workspace = Workspace::of(s);
    let [act, y, shrunk] =
        [workspace.take(pieces[0])?, workspace.take(pieces[1])?, workspace.take(pieces[2])?];
    let gate_up = experts.gate_up(act, shrunk)?;
    let down = experts.down(act, y, shrunk)?;
    let combine = experts.combine(y)?;
    // x row by pair, in the order of the permutation; activations lie in that order already.
    let shrink_x = LoraShrinkArgs {
        x: gate_up.x,
        tiles: gate_up.lora_tiles,
        perm: gate_up.perm,
        pair_weights: gate_up.pair_weights,
        lora: gate_up.lora,
        x_pitch: gate_up.x_pitch,
        k: gate_up.hidden,
        tile_words: 4,
        pairs_per_row: gate_up.top_k,
        reserved: 0,
    };
    let shrink_act = LoraShrinkArgs {
        x: act,
        perm: DevicePtr::NULL,
        pair_weights: DevicePtr::NULL,
        lora: down.lora,
        x_pitch: i64::from(down.inner),
        k: down.inner,
        pairs_per_row: 1,
        ..shrink_x
    };
    let shrink = |s: &mut CudaStream, args: &LoraShrinkArgs| {
        let LoraArgs { slice_count, .. } = args.lora;
        let grid = heuristics::shrink(experts.lora_tile_count, slice_count.unsigned_abs() as usize);
        launch(cuda, s, LORA_SHRINK, dtype, grid, args)
    };
    let (gate_up_entry, down_entry) =
        if lora { (MOE_GATE_UP_LORA, MOE_DOWN_LORA) } else { (MOE_GATE_UP, MOE_DOWN) };
    let tiles = experts.tile_count;
    shrink(s, &shrink_x)?;
    // A block makes gates and ups, so it takes twice the activations' outputs.
    launch(cuda, s, gate_up_entry, dtype, heuristics::tiled(tiles, 2 * inner), &gate_up)?;
    shrink(s, &shrink_act)?;
    launch(cuda, s, down_entry, dtype, heuristics::tiled(tiles, hidden), &down)?;
    launch(cuda, s, MOE_COMBINE, dtype, heuristics::combine(tokens, hidden), &combine)
}
