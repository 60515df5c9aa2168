//! The paged cache and attention over it.

use std::ops::Range;

use amphora_hal::Tensor;
use amphora_hal::ops::{CopyBlocks, KvStore, KvWrite, Mask, PagedAttention};

use super::by_dtype;
use crate::memory::{Access, Rows, RowsMut};
use crate::scratch::piece;
use crate::simd::{self, Keys, Level, QUERIES, Widen};
use crate::{Cpu, CpuStream};

pub(super) fn kv_write(device: &Cpu, s: &mut CpuStream, op: KvWrite<'_, Cpu>) {
    let (access, _) = device.launch(s);
    let index = access.slice::<i32>(op.plan.kv_index().tensor());
    write_rows(&access, index, op.k, op.k_cache);
    write_rows(&access, index, op.v, op.v_cache);
}

/// The same for keys that were just turned.
pub(super) fn store(access: &Access<'_>, k: &Tensor<Cpu>, store: &KvStore<'_, Cpu>) {
    let index = access.slice::<i32>(store.plan.kv_index().tensor());
    write_rows(access, index, k, store.k_cache);
    write_rows(access, index, store.v, store.v_cache);
}

fn write_rows(access: &Access<'_>, index: &[i32], from: &Tensor<Cpu>, cache: &Tensor<Cpu>) {
    by_dtype!(from, T => {
        let from = access.read::<T>(from);
        let cache = access.slice_mut::<T>(cache);
        for (row, &at) in index.iter().enumerate() {
            if let Ok(at) = usize::try_from(at) {
                cache[at * from.width()..][..from.width()].copy_from_slice(from.row(row));
            }
        }
    });
}

pub(super) fn copy_blocks(device: &Cpu, s: &mut CpuStream, op: CopyBlocks<'_, Cpu>) {
    let (access, _) = device.launch(s);
    let copies = access.slice::<i32>(op.plan.copies().tensor());
    for cache in [&*op.k_cache, &*op.v_cache] {
        by_dtype!(cache, T => {
            let block = cache.dims()[1..].iter().product::<usize>();
            let cache = access.slice_mut::<T>(cache);
            for pair in copies.chunks_exact(2).filter(|pair| pair[0] >= 0) {
                let from = pair[0] as usize * block;
                cache.copy_within(from..from + block, pair[1] as usize * block);
            }
        });
    }
}

/// Scratch of each thread: [`QUERIES`] queries, their sums, those of a part, their scores, and where positions
/// lie.
pub(super) fn workspace(threads: usize, head_dim: usize, context: usize) -> usize {
    let vectors = 3 * piece::<f32>(QUERIES * head_dim) + piece::<f32>(QUERIES * context);
    threads * (vectors + piece::<u32>(context))
}

/// Rows of a task: enough that keys are read for several queries, few enough that the long contexts of
/// a prompt's end spread over the threads.
const TASK_ROWS: usize = 16;

/// Positions whose values are summed apart: one sum over all in order would lose more the more there are.
/// Parts begin at multiples of it, whatever else is seen.
const SUM_POSITIONS: usize = 1024;

pub(super) fn paged_attention(device: &Cpu, s: &mut CpuStream, op: PagedAttention<'_, Cpu>) {
    let (access, mut scratch) = device.launch(s);
    let plan = op.plan;
    let (_, block_size) = plan.kv_shape();
    let q_start = access.slice::<i32>(plan.q_start().tensor());
    let context = access.slice::<i32>(plan.context().tensor());
    let blocks = access.read::<i32>(plan.block_table().tensor());
    let sinks = op.sinks.map(|sinks| access.slice::<f32>(sinks));
    let (heads, k_dim) = (op.q.dims()[1], op.q.dims()[2]);
    let (kv_heads, v_dim) = (op.v_cache.dims()[2], op.v_cache.dims()[3]);
    let longest = context.iter().copied().max().unwrap_or(0).max(0) as usize;
    by_dtype!(op.q, T => {
        let shared = Shared {
            level: device.0.level,
            q: access.read::<T>(op.q),
            k: access.slice::<T>(op.k_cache),
            v: access.slice::<T>(op.v_cache),
            sinks,
            group: heads / kv_heads,
            kv_heads,
            k_dim,
            v_dim,
            block_size,
            mask: op.mask,
            scale: op.scale,
        };
        let mut left = access.write::<T>(op.out);
        let (mut tasks, mut done, mut work) = (Vec::new(), 0, 0);
        for (sequence, &context) in context.iter().enumerate() {
            let (first, end) = (q_start[sequence] as usize, q_start[sequence + 1] as usize);
            for start in (first..end).step_by(TASK_ROWS) {
                let rows = start..end.min(start + TASK_ROWS);
                let (part, rest) = left.split_rows(start - done).1.split_rows(rows.len());
                (left, done) = (rest, rows.end);
                let position = context as usize + start - end;
                work += rows.len() * (position + rows.len()) * heads * (k_dim + v_dim);
                let mut columns = part;
                for kv_head in 0..kv_heads {
                    let (out, rest) = columns.split_columns(shared.group * v_dim);
                    columns = rest;
                    let blocks = blocks.row(sequence);
                    tasks.push(Task { row: rows.start, position, blocks, kv_head, out });
                }
            }
        }
        let states = (0..device.0.threads.parts(work)).map(|_| State {
            queries: scratch.take(QUERIES * k_dim),
            sums: scratch.take(QUERIES * v_dim),
            part: scratch.take(QUERIES * v_dim),
            scores: scratch.take(QUERIES * longest),
            at: scratch.take(longest),
        });
        let states = states.collect();
        device.0.threads.run_with(states, tasks, |state, task| shared.run(task, state));
    });
}

/// Consecutive rows of one sequence, for the heads that read one of its key heads.
struct Task<'a, T> {
    /// First row.
    row: usize,
    /// Its position.
    position: usize,
    blocks: &'a [i32],
    kv_head: usize,
    /// `[rows, group · v_dim]`.
    out: RowsMut<'a, T>,
}

/// A thread's scratch.
struct State<'a> {
    queries: &'a mut [f32],
    sums: &'a mut [f32],
    part: &'a mut [f32],
    scores: &'a mut [f32],
    at: &'a mut [u32],
}

struct Shared<'a, T> {
    level: Level,
    q: Rows<'a, T>,
    k: &'a [T],
    v: &'a [T],
    sinks: Option<&'a [f32]>,
    /// Heads that share a key head.
    group: usize,
    kv_heads: usize,
    k_dim: usize,
    v_dim: usize,
    block_size: usize,
    mask: Mask,
    scale: f32,
}

impl<T: Widen> Shared<'_, T> {
    fn run(&self, task: Task<'_, T>, state: &mut State<'_>) {
        let last = task.position + task.out.len() - 1;
        let at = &mut state.at[..last + 1];
        for (at, &block) in at.chunks_mut(self.block_size).zip(task.blocks) {
            let start = block as u32 * self.block_size as u32;
            at.iter_mut().zip(start..).for_each(|(at, row)| *at = row);
        }
        let queries = task.out.len() * self.group;
        let mut first = 0;
        let mut task = task;
        while first < queries {
            // Powers of two, which have loops of their own.
            let count = match queries - first {
                QUERIES.. => QUERIES,
                2.. => 2,
                _ => 1,
            };
            self.pass(&mut task, first..first + count, state);
            first += count;
        }
    }

    /// The first position that a query at `position` sees.
    fn first_seen(&self, position: usize) -> usize {
        match self.mask {
            Mask::Causal => 0,
            Mask::Window(window) => (position + 1).saturating_sub(window),
            Mask::Chunk(chunk) => position / chunk * chunk,
        }
    }

    /// `Σ softmax(scale · q·k)·v` of some queries of a task, numbered by row, then head.
    fn pass(&self, task: &mut Task<'_, T>, queries: Range<usize>, state: &mut State<'_>) {
        let (k_dim, v_dim, level) = (self.k_dim, self.v_dim, self.level);
        let head = |query: usize| task.kv_head * self.group + query % self.group;
        let position = |query: usize| task.position + query / self.group;
        // Positions that any of them sees; each looks at its own scores alone.
        let from = self.first_seen(position(queries.start));
        let end = position(queries.end - 1) + 1;
        let at = &state.at[from..end];
        let wide = &mut state.queries[..queries.len() * k_dim];
        for (query, to) in queries.clone().zip(wide.chunks_mut(k_dim)) {
            let row = self.q.row(task.row + query / self.group);
            simd::widen(level, &row[head(query) * k_dim..][..k_dim], to);
        }
        let (pitch, skip) = (self.kv_heads * k_dim, task.kv_head * k_dim);
        let keys = Keys { data: self.k, at, pitch, skip, dim: k_dim };
        let scores = &mut state.scores[..queries.len() * at.len()];
        simd::scores(level, self.scale, wide, keys, scores);

        let mut weights: [&[f32]; QUERIES] = [&[]; QUERIES];
        for (i, scores) in scores.chunks_mut(at.len()).enumerate() {
            let query = queries.start + i;
            let scores =
                &mut scores[self.first_seen(position(query)) - from..=position(query) - from];
            self.softmax(self.sinks.map(|sinks| sinks[head(query)]), scores);
            weights[i] = scores;
        }

        let (pitch, skip) = (self.kv_heads * v_dim, task.kv_head * v_dim);
        let values = |seen: Range<usize>| Keys {
            data: self.v,
            at: &state.at[seen],
            pitch,
            skip,
            dim: v_dim,
        };
        let sums = &mut state.sums[..queries.len() * v_dim];
        let part = &mut state.part[..queries.len() * v_dim];
        sums.fill(0.0);
        for start in (from / SUM_POSITIONS * SUM_POSITIONS..end).step_by(SUM_POSITIONS) {
            part.fill(0.0);
            let of_part: [_; QUERIES] = std::array::from_fn(|i| {
                let seen = self.first_seen(position(queries.start + i));
                let first = seen.max(start);
                let end = (position(queries.start + i) + 1).min(start + SUM_POSITIONS).max(first);
                (first..end, weights[i].get(first - seen..end - seen).unwrap_or(&[]))
            });
            self.weigh(&of_part[..queries.len()], values, part);
            sums.iter_mut().zip(&*part).for_each(|(sum, part)| *sum += part);
        }
        for (query, sum) in queries.zip(sums.chunks(v_dim)) {
            let row = task.out.row(query / self.group);
            simd::narrow(level, sum, &mut row[query % self.group * v_dim..][..v_dim]);
        }
    }

    /// Adds to each sum `[queries, v_dim]` the values of the positions that its query sees, by their shares. What
    /// all see passes together; what some see is added to theirs alone, in order.
    fn weigh<'a>(
        &self,
        queries: &[(Range<usize>, &[f32])],
        values: impl Fn(Range<usize>) -> Keys<'a, T>,
        sums: &mut [f32],
    ) where
        T: 'a,
    {
        let (Some((first, _)), Some((last, _))) = (queries.first(), queries.last()) else { return };
        let common = last.start..first.end;
        let each = || queries.iter().zip(0..);
        let sum = |i: usize| i * self.v_dim..(i + 1) * self.v_dim;
        if common.is_empty() {
            for ((seen, shares), i) in each() {
                simd::weigh(self.level, &[shares], values(seen.clone()), &mut sums[sum(i)]);
            }
            return;
        }
        let mut shared: [&[f32]; QUERIES] = [&[]; QUERIES];
        for ((seen, shares), i) in each() {
            let (before, rest) = shares.split_at(common.start - seen.start);
            shared[i] = &rest[..common.len()];
            let values = values(seen.start..common.start);
            simd::weigh(self.level, &[before], values, &mut sums[sum(i)]);
        }
        simd::weigh(self.level, &shared[..queries.len()], values(common.clone()), sums);
        for ((seen, shares), i) in each() {
            let after = common.end..seen.end;
            let shares = &shares[shares.len() - after.len()..];
            simd::weigh(self.level, &[shares], values(after), &mut sums[sum(i)]);
        }
    }

    /// Scores to shares; a sink takes a share and gives nothing.
    fn softmax(&self, sink: Option<f32>, scores: &mut [f32]) {
        let most = simd::largest(self.level, sink.unwrap_or(f32::NEG_INFINITY), scores);
        let total = simd::exp_less(self.level, most, scores)
            + sink.map_or(0.0, |sink| simd::exp(sink - most));
        simd::divide(self.level, total, scores);
    }
}
