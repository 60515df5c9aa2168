//! Dense projections.

use amphora_hal::ops::{Linear, LoraLinear};
use amphora_hal::{Tensor, Tile, Weight};

use super::{add_bias, finish, unrounded, widened};
use crate::lora::{DeltaOf, DeltaScratch, Deltas, scratch_bytes};
use crate::memory::{Access, Rows, RowsMut};
use crate::product::product;
use crate::scratch::piece;
use crate::{Cpu, CpuStream, TILE_ROWS};

pub(super) fn linear(device: &Cpu, s: &mut CpuStream, op: Linear<'_, Cpu>) {
    let (access, mut scratch) = device.launch(s);
    let x = widened(&access, &mut scratch, op.x);
    let (mut sums, narrow) = unrounded(&access, &mut scratch, op.out);
    base(device, &access, x, op.weight, op.bias, &mut sums);
    finish(sums, narrow);
}

/// The base product, the same for both operators: the law of the base row.
fn base(
    device: &Cpu,
    access: &Access<'_>,
    x: Rows<'_, f32>,
    weight: &Weight<Cpu>,
    bias: Option<&Tensor<Cpu>>,
    sums: &mut RowsMut<'_, f32>,
) {
    product(device, access, weight, x, sums.reborrow());
    add_bias(sums, bias.map(|bias| access.slice::<f32>(bias)));
}

/// Scratch of [`lora_linear`] beside the base product's.
pub(super) fn delta_workspace(k: usize, n: usize, rank: usize, threads: usize) -> usize {
    threads * (piece::<f32>(TILE_ROWS * k) + scratch_bytes(rank, n))
}

pub(super) fn lora_linear(device: &Cpu, s: &mut CpuStream, op: LoraLinear<'_, Cpu>) {
    let (access, mut scratch) = device.launch(s);
    let x = widened(&access, &mut scratch, op.base.x);
    let (mut sums, narrow) = unrounded(&access, &mut scratch, op.base.out);
    base(device, &access, x, op.base.weight, op.base.bias, &mut sums);

    let deltas = Deltas::of(device, &access, op.lora);
    let perm = access.slice::<i32>(op.segments.perm().tensor());
    let tiles: &[Tile] = bytemuck::cast_slice(access.slice::<i32>(op.segments.tiles().tensor()));
    let tiles = || tiles.iter().take_while(|tile| tile.rows > 0);
    let of = |tile: &Tile| DeltaOf { slot: tile.slot as usize, expert: 0, slices: op.slices };
    let (rank, k) = (deltas.rank(tiles().map(of)), x.width());
    let widest = op.slices.iter().map(|slice| slice.len).max().unwrap_or(0);
    let rows: usize = tiles().map(|tile| tile.rows as usize).sum();
    let outputs: usize = op.slices.iter().map(|slice| slice.len).sum();
    let parts = device.0.threads.parts(rows * rank * (k + outputs));

    // A tile's rows of `sums`, which no other tile has: `perm` is a permutation.
    let mut views: Vec<_> = sums.reborrow().each_row().into_iter().map(Some).collect();
    let mut tasks: Vec<_> = (0..parts)
        .map(|_| Task {
            tiles: Vec::new(),
            x: scratch.take(TILE_ROWS * k),
            delta: DeltaScratch::take(&mut scratch, rank, widest),
        })
        .collect();
    for (i, tile) in tiles().enumerate() {
        let tokens = &perm[tile.first as usize..][..tile.rows as usize];
        let take = |&token: &i32| views[token as usize].take().expect("a permutation repeats none");
        tasks[i % parts].tiles.push((
            tile.slot as usize,
            tokens,
            tokens.iter().map(take).collect(),
        ));
    }
    device.0.threads.run(tasks, |mut task| {
        for (slot, tokens, mut out) in task.tiles {
            let gathered = &mut task.x[..tokens.len() * k];
            for (to, &token) in gathered.chunks_mut(k).zip(tokens) {
                to.copy_from_slice(x.row(token as usize));
            }
            let at = DeltaOf { slot, expert: 0, slices: op.slices };
            deltas.add(at, Rows::of(gathered, k), &mut out, &mut task.delta);
        }
    });
    finish(sums, narrow);
}

/// A tile's slot, its tokens, and their rows of the output.
type TileRows<'a, 'o> = (usize, &'a [i32], Vec<RowsMut<'o, f32>>);

/// One thread's tiles.
struct Task<'a, 'o> {
    tiles: Vec<TileRows<'a, 'o>>,
    x: &'a mut [f32],
    delta: DeltaScratch<'a>,
}
