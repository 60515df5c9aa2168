//! Dense projections.

use amphora_hal::ops::{Linear, LoraLinear};
use amphora_hal::{LoraSlice, LoraTable, SegmentTable, Tensor, Tile, Weight};

use super::{add_bias, by_dtype, finish, unrounded};
use crate::lora::{DeltaOf, DeltaScratch, Deltas, scratch_bytes};
use crate::memory::{Access, Rows, RowsMut};
use crate::product::product;
use crate::scratch::{Scratch, piece};
use crate::simd::Widen;
use crate::{Cpu, CpuStream, TILE_ROWS};

pub(super) fn linear(device: &Cpu, s: &mut CpuStream, op: Linear<'_, Cpu>) {
    let (access, mut scratch) = device.launch(s);
    let (mut sums, narrow) = unrounded(&access, &mut scratch, op.out);
    by_dtype!(op.x, T => {
        base(device, &access, access.read::<T>(op.x), op.weight, op.bias, &mut sums);
    });
    finish(device, sums, narrow);
}

/// The base product, the same for both operators: the law of the base row.
fn base<X: Widen>(
    device: &Cpu,
    access: &Access<'_>,
    x: Rows<'_, X>,
    weight: &Weight<Cpu>,
    bias: Option<&Tensor<Cpu>>,
    sums: &mut RowsMut<'_, f32>,
) {
    product(device, access, weight, x, sums.reborrow());
    add_bias(device.0.level, sums, bias.map(|bias| access.slice::<f32>(bias)));
}

/// Scratch of [`lora_linear`] beside the base product's.
pub(super) fn delta_workspace(k: usize, n: usize, rank: usize, threads: usize) -> usize {
    threads * (piece::<f32>(TILE_ROWS * k) + scratch_bytes(rank, n))
}

pub(super) fn lora_linear(device: &Cpu, s: &mut CpuStream, op: LoraLinear<'_, Cpu>) {
    let (access, mut scratch) = device.launch(s);
    let LoraLinear { base: linear, lora, segments, slices } = op;
    let (mut sums, narrow) = unrounded(&access, &mut scratch, linear.out);
    let with = With { lora, segments, slices };
    by_dtype!(linear.x, T => {
        let x = access.read::<T>(linear.x);
        base(device, &access, x, linear.weight, linear.bias, &mut sums);
        add_deltas(device, &access, &mut scratch, (with, x), &mut sums);
    });
    finish(device, sums, narrow);
}

/// Adapters of a product.
#[derive(Clone, Copy)]
struct With<'a> {
    lora: &'a LoraTable<Cpu>,
    segments: &'a SegmentTable<Cpu>,
    slices: &'a [LoraSlice],
}

/// Adds the deltas of every tile.
fn add_deltas<'a, X: Widen>(
    device: &Cpu,
    access: &'a Access<'_>,
    scratch: &mut Scratch<'a>,
    (with, x): (With<'a>, Rows<'_, X>),
    sums: &mut RowsMut<'_, f32>,
) {
    let deltas = Deltas::of(device, access, with.lora);
    let perm = access.slice::<i32>(with.segments.perm().tensor());
    let tiles: &[Tile] = bytemuck::cast_slice(access.slice::<i32>(with.segments.tiles().tensor()));
    let tiles = || tiles.iter().take_while(|tile| tile.rows > 0);
    let of = |tile: &Tile| DeltaOf { slot: tile.slot as usize, expert: 0, slices: with.slices };
    let (rank, k) = (deltas.rank(tiles().map(of)), x.width());
    let widest = with.slices.iter().map(|slice| slice.len).max().unwrap_or(0);
    let rows: usize = tiles().map(|tile| tile.rows as usize).sum();
    let outputs: usize = with.slices.iter().map(|slice| slice.len).sum();
    let parts = device.0.threads.parts(rows * rank * (k + outputs));

    // A tile's rows of `sums`, which no other tile has: `perm` is a permutation.
    let mut views: Vec<_> = sums.reborrow().each_row().into_iter().map(Some).collect();
    let tasks = tiles().map(|tile| {
        let tokens = &perm[tile.first as usize..][..tile.rows as usize];
        let take = |&token: &i32| views[token as usize].take().expect("a permutation repeats none");
        (tile.slot as usize, tokens, tokens.iter().map(take).collect::<Vec<_>>())
    });
    let tasks: Vec<_> = tasks.collect();
    let states = (0..parts)
        .map(|_| (scratch.take::<X>(TILE_ROWS * k), DeltaScratch::take(scratch, rank, widest)));
    let states: Vec<_> = states.collect();
    device.0.threads.run_with(states, tasks, |(gathered, scratch), (slot, tokens, mut out)| {
        let gathered = &mut gathered[..tokens.len() * k];
        for (to, &token) in gathered.chunks_mut(k).zip(tokens) {
            to.copy_from_slice(x.row(token as usize));
        }
        let at = DeltaOf { slot, expert: 0, slices: with.slices };
        deltas.add(at, Rows::of(gathered, k), &mut out, scratch);
    });
}
