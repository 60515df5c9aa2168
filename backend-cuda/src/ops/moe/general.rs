//! Both expert products for every shape and type, simply: one launch for each step of the formula.

use amphora_cuda_kernels::args::LoraShrinkArgs;
use amphora_cuda_kernels::{
    DevicePtr, MOE_COMBINE, MOE_DOWN, MOE_DOWN_DELTA, MOE_DOWN_LORA, MOE_GATE_UP, MOE_GATE_UP_LORA,
};
use amphora_hal::Result;

use super::super::shrink::Shrink;
use super::Experts;
use crate::device::{Cuda, CudaStream};
use crate::heuristics;
use crate::launch::{Workspace, launch};
use crate::tuning::operators::Deltas;

/// Both products and the sum over a token's experts, with a shrink in front of each product if there
/// are adapters.
pub(super) fn run(
    cuda: &Cuda,
    s: &mut CudaStream,
    experts: &Experts<'_>,
    of_down: Deltas,
) -> Result<()> {
    let &Experts { pairs, hidden, inner, dtype, tokens, .. } = experts;
    let lora = experts.adapters.is_some();
    let mut workspace = Workspace::of(s);
    let [act, y, shrunk] = experts.intermediates(&mut workspace)?;
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
        parts: 1,
        partials: DevicePtr::NULL,
        part_pitch: 0,
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
    let shrink = Shrink { dtype, tokens, positions: pairs, tiles: experts.lora_tile_count };
    let gate_up_entry = if lora { MOE_GATE_UP_LORA } else { MOE_GATE_UP };
    let down_entry = if lora && of_down == Deltas::Inside { MOE_DOWN_LORA } else { MOE_DOWN };
    let tiles = experts.tile_count;
    shrink.run(cuda, s, &workspace, &shrink_x)?;
    // A block makes gates and ups, so it takes twice the activations' outputs.
    launch(cuda, s, gate_up_entry, dtype, heuristics::tiled(tiles, 2 * inner), &gate_up)?;
    shrink.run(cuda, s, &workspace, &shrink_act)?;
    launch(cuda, s, down_entry, dtype, heuristics::tiled(tiles, hidden), &down)?;
    if lora && of_down == Deltas::Apart {
        let grid = heuristics::down_deltas(experts.lora_tile_count, hidden);
        launch(cuda, s, MOE_DOWN_DELTA, dtype, grid, &down)?;
    }
    launch(cuda, s, MOE_COMBINE, dtype, heuristics::combine(tokens, hidden), &combine)
}
