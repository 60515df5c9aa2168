//! The paged cache and attention over it.

use amphora_hal::Tensor;
use amphora_hal::ops::{CopyBlocks, KvWrite, Mask, PagedAttention};

use super::{by_dtype, round_row, widen_row};
use crate::memory::{Access, Rows, RowsMut};
use crate::scratch::piece;
use crate::simd::{self, Level, Widen};
use crate::{Cpu, CpuStream};

pub(super) fn kv_write(device: &Cpu, s: &mut CpuStream, op: KvWrite<'_, Cpu>) {
    let (access, _) = device.launch(s);
    let index = access.slice::<i32>(op.plan.kv_index().tensor());
    write_rows(&access, index, op.k, op.k_cache);
    write_rows(&access, index, op.v, op.v_cache);
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

/// Scratch of each thread: a query, its scores, its output.
pub(super) fn workspace(threads: usize, head_dim: usize, context: usize) -> usize {
    threads * (2 * piece::<f32>(head_dim) + piece::<f32>(context))
}

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
            heads,
            kv_heads,
            k_dim,
            v_dim,
            block_size,
            mask: op.mask,
            scale: op.scale,
        };
        let mut out = access.write::<T>(op.out);
        let mut queries = Vec::new();
        for (sequence, &context) in context.iter().enumerate() {
            let (first, end) = (q_start[sequence] as usize, q_start[sequence + 1] as usize);
            let blocks = if end > first { blocks.row(sequence) } else { &[] };
            for row in first..end {
                let position = context as usize + row - end;
                queries.push(Query { row, position, blocks });
            }
        }
        let work: usize = queries.iter().map(|q| (q.position + 1) * heads * (k_dim + v_dim)).sum();
        let parts = device.0.threads.parts(work);
        // Rows in turn, so that the long contexts of a prompt's end spread over the threads.
        let mut tasks: Vec<Task<'_, T>> = (0..parts).map(|_| Task {
            queries: Vec::new(),
            query: scratch.take(k_dim),
            scores: scratch.take(longest),
            sum: scratch.take(v_dim),
        }).collect();
        let mut left = out.reborrow();
        let mut done = 0;
        for (i, query) in queries.into_iter().enumerate() {
            let (row, rest) = left.split_rows(query.row - done).1.split_rows(1);
            left = rest;
            done = query.row + 1;
            tasks[i % parts].queries.push((query, row));
        }
        device.0.threads.run(tasks, |task| shared.run(task));
    });
}

/// One query row.
struct Query<'a> {
    row: usize,
    position: usize,
    blocks: &'a [i32],
}

struct Task<'a, T> {
    queries: Vec<(Query<'a>, RowsMut<'a, T>)>,
    query: &'a mut [f32],
    scores: &'a mut [f32],
    sum: &'a mut [f32],
}

struct Shared<'a, T> {
    level: Level,
    q: Rows<'a, T>,
    k: &'a [T],
    v: &'a [T],
    sinks: Option<&'a [f32]>,
    heads: usize,
    kv_heads: usize,
    k_dim: usize,
    v_dim: usize,
    block_size: usize,
    mask: Mask,
    scale: f32,
}

impl<T: Widen> Shared<'_, T> {
    fn run(&self, task: Task<'_, T>) {
        let Task { queries, query, scores, sum } = task;
        for (at, mut out) in queries {
            for head in 0..self.heads {
                widen_row(&self.q.row(at.row)[head * self.k_dim..][..self.k_dim], query);
                self.head(&at, head, query, scores, sum);
                round_row(sum, &mut out.row(0)[head * self.v_dim..][..self.v_dim]);
            }
        }
    }

    /// `sum = Σ softmax(scale · q·k)·v` of one query and head.
    fn head(&self, at: &Query<'_>, head: usize, q: &[f32], scores: &mut [f32], sum: &mut [f32]) {
        let kv_head = head * self.kv_heads / self.heads;
        let from = match self.mask {
            Mask::Causal => 0,
            Mask::Window(window) => (at.position + 1).saturating_sub(window),
            Mask::Chunk(chunk) => at.position / chunk * chunk,
        };
        let place = |position: usize| {
            let block = at.blocks[position / self.block_size] as usize;
            (block * self.block_size + position % self.block_size) * self.kv_heads + kv_head
        };
        let scores = &mut scores[..at.position + 1 - from];
        let sink = self.sinks.map(|sinks| sinks[head]);
        let mut most = sink.unwrap_or(f32::NEG_INFINITY);
        for (i, score) in scores.iter_mut().enumerate() {
            let k = &self.k[place(from + i) * self.k_dim..][..self.k_dim];
            *score = self.scale * simd::dot(self.level, q, k);
            most = most.max(*score);
        }
        let mut total = sink.map_or(0.0, |sink| (sink - most).exp());
        for score in scores.iter_mut() {
            *score = (*score - most).exp();
            total += *score;
        }
        sum.fill(0.0);
        for (i, score) in scores.iter().enumerate() {
            let v = &self.v[place(from + i) * self.v_dim..][..self.v_dim];
            simd::add_scaled(self.level, sum, *score / total, v);
        }
    }
}
