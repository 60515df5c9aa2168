//! Routing and the experts.

use std::ops::Range;

use amphora_hal::ops::{
    Activation, Combine, FusedMoe, MoeRoute, MoeTile, RouteScore, RoutingShape, WeightOn,
};
use amphora_hal::{LoraSlice, LoraTable};

use super::{ELEMENT_COST, add_bias, by_dtype};
use crate::lora::{DeltaOf, DeltaScratch, Deltas, scratch_bytes};
use crate::memory::{Rows, RowsMut};
use crate::product::{MatrixPart, Packed, ROWS_OF_A_READ};
use crate::scratch::{Scratch, piece};
use crate::simd::{self, Level, Widen};
use crate::threads::ranges;
use crate::{Cpu, CpuStream, TILE_ROWS};

pub(super) fn route_workspace(tokens: usize, top_k: usize, experts: usize) -> usize {
    piece::<u64>(tokens * top_k) + 2 * piece::<f32>(experts) + piece::<i32>(experts)
}

pub(super) fn route(device: &Cpu, s: &mut CpuStream, op: MoeRoute<'_, Cpu>) {
    let (access, mut scratch) = device.launch(s);
    let RoutingShape { tokens, top_k, experts, tile_rows, .. } = *op.routing.shape();
    let logits = access.read::<f32>(op.logits);
    let live = access.slice::<i32>(op.live.tensor());
    let slot = access.slice::<i32>(op.slot.tensor());
    let chosen = access.slice_mut::<i32>(op.routing.experts().tensor());
    let weights = access.slice_mut::<f32>(op.routing.weights());
    let perm = access.slice_mut::<i32>(op.routing.perm().tensor());
    let choice = Choice {
        scores: scratch.take(experts),
        keys: scratch.take(experts),
        order: scratch.take(experts),
        correction: op.correction.map(|correction| access.slice::<f32>(correction)),
    };
    choose(&op, choice, logits, live, chosen, weights);

    // One word for each live pair: (expert, slot, pair), so that an unstable sort is stable. A pair
    // without a slot has the largest one there is and comes last.
    let pairs = scratch.take::<u64>(tokens * top_k);
    let mut count = 0;
    for (pair, &expert) in chosen.iter().enumerate().filter(|(_, expert)| **expert >= 0) {
        let slot = u64::from(slot[pair / top_k] as u16);
        pairs[count] = (expert as u64) << 48 | slot << 32 | pair as u64;
        count += 1;
    }
    let pairs = &mut pairs[..count];
    pairs.sort_unstable();
    perm.fill(-1);
    perm.iter_mut().zip(pairs.iter()).for_each(|(to, word)| *to = *word as u32 as i32);
    let (tiles, lora_tiles) = (op.routing.tiles(), op.routing.lora_tiles());
    let tiles = bytemuck::cast_slice_mut(access.slice_mut::<i32>(tiles.tensor()));
    cut(pairs, 48, tile_rows, tiles);
    let lora_tiles = bytemuck::cast_slice_mut(access.slice_mut::<i32>(lora_tiles.tensor()));
    cut(pairs, 32, tile_rows, lora_tiles);
}

/// Cuts runs of equal upper bits into tiles. By (expert, slot) the runs without a slot get none.
fn cut(pairs: &[u64], shift: u32, tile_rows: usize, tiles: &mut [MoeTile]) {
    let mut next = 0;
    let mut first = 0;
    for run in pairs.chunk_by(|a, b| a >> shift == b >> shift) {
        let slot = if shift == 48 { -1 } else { i32::from((run[0] >> 32) as u16 as i16) };
        if shift == 48 || slot >= 0 {
            for start in (0..run.len()).step_by(tile_rows) {
                tiles[next] = MoeTile {
                    expert: (run[0] >> 48) as i32,
                    slot,
                    first: (first + start) as i32,
                    rows: (run.len() - start).min(tile_rows) as i32,
                };
                next += 1;
            }
        }
        first += run.len();
    }
    tiles[next..].fill(MoeTile { expert: 0, slot: -1, first: 0, rows: 0 });
}

/// Scratch of one row's choice.
struct Choice<'a> {
    scores: &'a mut [f32],
    keys: &'a mut [f32],
    order: &'a mut [i32],
    correction: Option<&'a [f32]>,
}

/// Fills `chosen` and `weights`, `[tokens, top_k]`.
fn choose(
    op: &MoeRoute<'_, Cpu>,
    choice: Choice<'_>,
    logits: Rows<'_, f32>,
    live: &[i32],
    chosen: &mut [i32],
    weights: &mut [f32],
) {
    let RoutingShape { top_k, .. } = *op.routing.shape();
    let Choice { scores, keys, order, correction } = choice;
    let rows = chosen.chunks_mut(top_k).zip(weights.chunks_mut(top_k)).enumerate();
    for (row, (chosen, weights)) in rows {
        if live[row] < 0 {
            chosen.fill(-1);
            weights.fill(0.0);
            continue;
        }
        scores.iter_mut().zip(logits.row(row)).for_each(|(score, logit)| *score = ordered(*logit));
        // Logits order as scores do, and have no ties that only rounding made. Adding 0 makes −0 and 0 one.
        let zero = if op.score == RouteScore::SoftmaxTopk { -0.0 } else { 0.0 };
        keys.iter_mut().zip(&*scores).for_each(|(key, logit)| *key = logit + zero);
        match op.score {
            RouteScore::SoftmaxTopk => {}
            RouteScore::Softmax => softmax(scores),
            RouteScore::Sigmoid => {
                scores.iter_mut().for_each(|score| *score = 1.0 / (1.0 + (-*score).exp()));
            }
        }
        if correction.is_some() || op.groups.is_some() {
            keys.copy_from_slice(scores);
            if let Some(correction) = correction {
                keys.iter_mut().zip(correction).for_each(|(key, c)| *key += c);
            }
            keys.iter_mut().for_each(|key| *key = ordered(*key));
        }
        if let Some(groups) = op.groups {
            keep_groups(keys, groups);
        }
        // Descending by key, ties to the lower expert.
        order.iter_mut().zip(0..).for_each(|(to, expert)| *to = expert);
        order.sort_by(|a, b| keys[*b as usize].total_cmp(&keys[*a as usize]));
        chosen.copy_from_slice(&order[..top_k]);
        weights.iter_mut().zip(chosen.iter()).for_each(|(w, e)| *w = scores[*e as usize]);
        if op.score == RouteScore::SoftmaxTopk {
            softmax(weights);
        }
        if op.renorm {
            let total: f32 = weights.iter().sum();
            weights.iter_mut().for_each(|w| *w /= total);
        }
        weights.iter_mut().for_each(|w| *w *= op.scale);
    }
}

/// What is no number is never preferred.
fn ordered(value: f32) -> f32 {
    if value.is_nan() { f32::NEG_INFINITY } else { value }
}

fn softmax(values: &mut [f32]) {
    let most = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    values.iter_mut().for_each(|v| *v = (*v - most).exp());
    let total: f32 = values.iter().sum();
    values.iter_mut().for_each(|v| *v /= total);
}

/// Leaves the keys of the best groups, ties to the lower group; the others become −∞.
fn keep_groups(keys: &mut [f32], groups: amphora_hal::ops::ExpertGroups) {
    let size = keys.len() / groups.groups;
    let mut ranked: Vec<(usize, f32)> = keys
        .chunks(size)
        .map(|group| {
            let mut best: Vec<f32> = group.to_vec();
            best.sort_by(|a, b| b.total_cmp(a));
            ordered(best[..groups.best].iter().sum())
        })
        .enumerate()
        .collect();
    ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
    for &(group, _) in &ranked[groups.keep..] {
        keys[group * size..][..size].fill(f32::NEG_INFINITY);
    }
}

/// What decides the scratch of [`fused`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) pairs: usize,
    pub(super) hidden: usize,
    /// Outputs of gate_up.
    pub(super) inner: usize,
    pub(super) rank: usize,
    pub(super) threads: usize,
}

pub(super) fn workspace(sizes: Sizes) -> usize {
    let Sizes { pairs, hidden, inner, rank, threads } = sizes;
    let tile = piece::<f32>(TILE_ROWS * hidden)
        + piece::<f32>(TILE_ROWS * inner)
        + piece::<f32>(TILE_ROWS * inner / 2)
        + scratch_bytes(rank, hidden.max(inner));
    piece::<f32>(pairs * hidden) + piece::<i32>(pairs) + threads * (tile + piece::<f32>(hidden))
}

/// Adapters of a fused product.
#[derive(Clone, Copy)]
pub(super) struct With<'a> {
    pub(super) table: &'a LoraTable<Cpu>,
    pub(super) gate_up: &'a [LoraSlice],
    pub(super) down: &'a [LoraSlice],
}

pub(super) fn fused(
    device: &Cpu,
    s: &mut CpuStream,
    op: FusedMoe<'_, Cpu>,
    with: Option<With<'_>>,
) {
    let (access, mut scratch) = device.launch(s);
    let routing = op.routing;
    let top_k = routing.shape().top_k;
    let weights = access.slice::<f32>(routing.weights());
    let perm = access.slice::<i32>(routing.perm().tensor());
    let tiles: &[MoeTile] = bytemuck::cast_slice(access.slice::<i32>(routing.tiles().tensor()));
    let lora_tiles: &[MoeTile] =
        bytemuck::cast_slice(access.slice::<i32>(routing.lora_tiles().tensor()));
    let live = |tiles: &[MoeTile]| tiles.iter().take_while(|tile| tile.rows > 0).count();
    let (hidden, inner) = (op.gate_up.k(), op.gate_up.n());
    by_dtype!(op.x, T => {
        let experts = Experts {
            level: device.0.level,
            x: access.read::<T>(op.x),
            perm,
            weights,
            top_k,
            lora_tiles: &lora_tiles[..live(lora_tiles)],
            gate_up: Packed::of(&access, op.gate_up),
            gate_up_bias: op.gate_up_bias.map(|bias| access.read::<f32>(bias)),
            down: Packed::of(&access, op.down),
            down_bias: op.down_bias.map(|bias| access.read::<f32>(bias)),
            activation: op.activation,
            weight_on: op.weight_on,
            hidden,
            inner,
            with: with.map(|with| (Deltas::of(device, &access, with.table), with)),
        };
        let tiles = &tiles[..live(tiles)];
        let rank = experts.rank();

        // Outputs of the pairs in permuted order, so that a tile owns consecutive rows.
        let pairs: usize = tiles.iter().map(|tile| tile.rows as usize).sum();
        let outputs = scratch.take::<f32>(perm.len() * hidden);
        let place = scratch.take::<i32>(perm.len());
        place.fill(-1);
        perm[..pairs].iter().zip(0..).for_each(|(&pair, at)| place[pair as usize] = at);
        let read = pairs.max(tiles.len() * ROWS_OF_A_READ);
        let parts = device.0.threads.parts(read * hidden * inner * 3 / 2).min(tiles.len().max(1));
        let mut left = RowsMut::of(&mut outputs[..pairs * hidden], hidden);
        let mut tasks = Vec::with_capacity(tiles.len());
        for tile in tiles {
            let (rows, rest) = left.split_rows(tile.rows as usize);
            left = rest;
            tasks.push((*tile, rows));
        }
        let states = (0..parts).map(|_| TileScratch::<T>::take(&mut scratch, hidden, inner, rank));
        let states = states.collect();
        device.0.threads.run_with(states, tasks, |scratch, (tile, rows)| {
            experts.tile(tile, rows, scratch);
        });

        let mut left = access.write::<T>(op.out);
        let cost = ELEMENT_COST * hidden * (top_k + 1);
        let mut tasks = Vec::new();
        for range in ranges(left.len(), device.0.threads.parts(left.len() * cost), 1) {
            let (part, rest) = left.split_rows(range.len());
            left = rest;
            tasks.push((range, part));
        }
        let states = tasks.iter().map(|_| scratch.take::<f32>(hidden)).collect();
        let add = Sum { combine: op.combine, weight_on: op.weight_on, top_k, weights, place, outputs };
        device.0.threads.run_with(states, tasks, |sum, (range, mut out)| {
            for (i, token) in range.enumerate() {
                add.token(device.0.level, token, sum, out.row(i));
            }
        });
    });
}

/// How the experts' outputs of a token become one.
struct Sum<'a> {
    combine: Combine,
    weight_on: WeightOn,
    top_k: usize,
    weights: &'a [f32],
    /// Where a pair's output is; −1 for none.
    place: &'a [i32],
    outputs: &'a [f32],
}

impl Sum<'_> {
    /// `to = Σ weight · output` of its pairs in order, behind what was there if it is added; rounded once.
    fn token<T: Widen>(&self, level: Level, token: usize, sum: &mut [f32], to: &mut [T]) {
        match self.combine {
            Combine::Replace => sum.fill(0.0),
            Combine::Add => simd::widen(level, to, sum),
        }
        for pair in token * self.top_k..(token + 1) * self.top_k {
            let Ok(at) = usize::try_from(self.place[pair]) else { continue };
            let weight = match self.weight_on {
                WeightOn::Output => self.weights[pair],
                WeightOn::Input => 1.0,
            };
            simd::add_scaled(level, weight, &self.outputs[at * sum.len()..][..sum.len()], sum);
        }
        simd::narrow(level, sum, to);
    }
}

/// One thread's scratch.
struct TileScratch<'a, T> {
    x: &'a mut [T],
    gate_up: &'a mut [f32],
    activated: &'a mut [T],
    delta: DeltaScratch<'a>,
}

impl<'a, T: Widen> TileScratch<'a, T> {
    fn take(scratch: &mut Scratch<'a>, hidden: usize, inner: usize, rank: usize) -> Self {
        TileScratch {
            x: scratch.take(TILE_ROWS * hidden),
            gate_up: scratch.take(TILE_ROWS * inner),
            activated: scratch.take(TILE_ROWS * inner / 2),
            delta: DeltaScratch::take(scratch, rank, hidden.max(inner)),
        }
    }
}

/// What all tiles of one call share.
struct Experts<'a, T> {
    level: Level,
    x: Rows<'a, T>,
    perm: &'a [i32],
    weights: &'a [f32],
    top_k: usize,
    lora_tiles: &'a [MoeTile],
    gate_up: Packed<'a>,
    gate_up_bias: Option<Rows<'a, f32>>,
    down: Packed<'a>,
    down_bias: Option<Rows<'a, f32>>,
    activation: Activation,
    weight_on: WeightOn,
    hidden: usize,
    inner: usize,
    with: Option<(Deltas<'a>, With<'a>)>,
}

impl<T: Widen> Experts<'_, T> {
    /// The largest rank class among the deltas of this call.
    fn rank(&self) -> usize {
        let Some((deltas, with)) = &self.with else { return 0 };
        deltas.rank(self.lora_tiles.iter().flat_map(|tile| {
            let (slot, expert) = (tile.slot as usize, tile.expert as usize);
            [with.gate_up, with.down].map(|slices| DeltaOf { slot, expert, slices })
        }))
    }

    fn tile(&self, tile: MoeTile, out: RowsMut<'_, f32>, scratch: &mut TileScratch<'_, T>) {
        let (hidden, inner, rows) = (self.hidden, self.inner, tile.rows as usize);
        let (expert, first) = (tile.expert as usize, tile.first as usize);
        let x = &mut scratch.x[..rows * hidden];
        for (to, &pair) in x.chunks_mut(hidden).zip(&self.perm[first..]) {
            let pair = pair as usize;
            to.copy_from_slice(self.x.row(pair / self.top_k));
            if self.weight_on == WeightOn::Input {
                // An operand of the product, so it is rounded to the compute type.
                simd::scale(self.level, self.weights[pair], to);
            }
        }
        let x = Rows::of(x, hidden);
        let gate_up = &mut scratch.gate_up[..rows * inner];
        let at = MatrixPart { matrix: expert, n: inner, k: hidden, first: 0 };
        let mut sums = RowsMut::of(gate_up, inner);
        self.gate_up.product(self.level, at, x, sums.reborrow());
        add_bias(self.level, &mut sums, self.gate_up_bias.map(|bias| bias.row(expert)));
        self.deltas(tile, |with| with.gate_up, x, sums, &mut scratch.delta);

        let activated = &mut scratch.activated[..rows * inner / 2];
        for (from, to) in gate_up.chunks(inner).zip(activated.chunks_mut(inner / 2)) {
            simd::activate(self.level, self.activation, from, to);
        }
        let activated = Rows::of(activated, inner / 2);
        let at = MatrixPart { matrix: expert, n: hidden, k: inner / 2, first: 0 };
        let mut sums = out;
        self.down.product(self.level, at, activated, sums.reborrow());
        add_bias(self.level, &mut sums, self.down_bias.map(|bias| bias.row(expert)));
        self.deltas(tile, |with| with.down, activated, sums, &mut scratch.delta);
    }

    /// Adds the deltas of the adapters whose (expert, slot) tiles reach into this tile.
    fn deltas<'s>(
        &'s self,
        tile: MoeTile,
        slices: impl Fn(&With<'s>) -> &'s [LoraSlice],
        x: Rows<'_, T>,
        sums: RowsMut<'_, f32>,
        scratch: &mut DeltaScratch<'_>,
    ) {
        let Some((deltas, with)) = &self.with else {
            return;
        };
        let (first, end) = (tile.first, tile.first + tile.rows);
        let from = self.lora_tiles.partition_point(|lora| lora.first + lora.rows <= first);
        let reach = self.lora_tiles[from..].iter().take_while(|lora| lora.first < end);
        let mut rows = sums.each_row();
        for lora in reach {
            let part: Range<usize> = (lora.first.max(first) - first) as usize
                ..((lora.first + lora.rows).min(end) - first) as usize;
            let at = DeltaOf {
                slot: lora.slot as usize,
                expert: tile.expert as usize,
                slices: slices(with),
            };
            deltas.add(at, x.part(part.clone()), &mut rows[part], scratch);
        }
    }
}
