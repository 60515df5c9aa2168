//! Norms, rotary positions, and the activation of a dense MLP.

use amphora_hal::Float;
use amphora_hal::ops::{RmsNorm, Rope, RopePairing, Swiglu};

use super::moe::activate;
use super::{by_dtype, round_row, widen_row};
use crate::scratch::piece;
use crate::{Cpu, CpuStream};

pub(super) fn rms_norm(device: &Cpu, s: &mut CpuStream, op: RmsNorm<'_, Cpu>) {
    let (access, _) = device.launch(s);
    let weight = access.slice::<f32>(op.weight);
    by_dtype!(op.x, T => {
        let in_place = op.out.is_same(op.x);
        let add = op.add.map(|add| access.read::<T>(add));
        let mut out = access.write::<T>(op.out);
        // In place there is no `add`, and x is viewed as the output alone.
        let mut x = (!in_place).then(|| access.write::<T>(op.x));
        for row in 0..out.len() {
            let to = out.row(row);
            if let Some(x) = &mut x {
                let from = x.row(row);
                if let Some(add) = &add {
                    for (x, add) in from.iter_mut().zip(add.row(row)) {
                        *x = T::from_f32(x.to_f32() + add.to_f32());
                    }
                }
                to.copy_from_slice(from);
            }
            to.chunks_mut(weight.len()).for_each(|head| normalise(head, weight, op.eps));
        }
    });
}

fn normalise<T: Float>(x: &mut [T], weight: &[f32], eps: f32) {
    let squares: f32 = x.iter().map(|v| v.to_f32() * v.to_f32()).sum();
    let inverse = 1.0 / (squares / x.len() as f32 + eps).sqrt();
    for (x, w) in x.iter_mut().zip(weight) {
        *x = T::from_f32(x.to_f32() * inverse * w);
    }
}

pub(super) fn rope(device: &Cpu, s: &mut CpuStream, op: Rope<'_, Cpu>) {
    let (access, _) = device.launch(s);
    let position = access.slice::<i32>(op.position.tensor());
    let table = access.read::<f32>(op.table);
    let q_scale = op.q_scale.map(|scale| access.slice::<f32>(scale));
    let dim = op.q.dims()[2];
    by_dtype!(op.q, T => {
        let mut q = access.write::<T>(op.q);
        let mut k = access.write::<T>(op.k);
        for (row, &position) in position.iter().enumerate() {
            let turn = Turn { table: table.row(position as usize), pairing: op.pairing };
            let scale = q_scale.map_or(1.0, |scale| scale[position as usize]);
            q.row(row).chunks_mut(dim).for_each(|head| turn.apply(head, scale));
            k.row(row).chunks_mut(dim).for_each(|head| turn.apply(head, 1.0));
        }
    });
}

/// The turn of one position.
struct Turn<'a> {
    /// Cosines, then sines.
    table: &'a [f32],
    pairing: RopePairing,
}

impl Turn<'_> {
    fn apply<T: Float>(&self, head: &mut [T], scale: f32) {
        let half = self.table.len() / 2;
        let (cos, sin) = self.table.split_at(half);
        for i in 0..half {
            let (a, b) = match self.pairing {
                RopePairing::Half => (i, i + half),
                RopePairing::Interleaved => (2 * i, 2 * i + 1),
            };
            let (x, y) = (head[a].to_f32(), head[b].to_f32());
            head[a] = T::from_f32((x * cos[i] - y * sin[i]) * scale);
            head[b] = T::from_f32((y * cos[i] + x * sin[i]) * scale);
        }
        if scale != 1.0 {
            for value in &mut head[2 * half..] {
                *value = T::from_f32(value.to_f32() * scale);
            }
        }
    }
}

/// What an exponential and a division cost, in multiply-adds.
const ACTIVATION_COST: usize = 16;

/// A widened row of `width`, and its activation before rounding, for each thread.
pub(super) fn swiglu_workspace(width: usize, threads: usize) -> usize {
    threads * (piece::<f32>(width) + piece::<f32>(width / 2))
}

pub(super) fn swiglu(device: &Cpu, s: &mut CpuStream, op: Swiglu<'_, Cpu>) {
    let (access, mut scratch) = device.launch(s);
    let [rows, inner] = [op.out.dims()[0], op.out.dims()[1]];
    if inner == 0 {
        return;
    }
    by_dtype!(op.x, T => {
        let x = access.read::<T>(op.x);
        let out = access.write::<T>(op.out);
        let parts = device.0.threads.parts(rows * inner * ACTIVATION_COST);
        let mut tasks: Vec<_> = (0..parts)
            .map(|_| (Vec::new(), scratch.take::<f32>(2 * inner), scratch.take::<f32>(inner)))
            .collect();
        for (row, to) in out.each_row().into_iter().enumerate() {
            tasks[row % parts].0.push((row, to));
        }
        device.0.threads.run(tasks, |(rows, wide, activated)| {
            for (row, mut to) in rows {
                widen_row(x.row(row), wide);
                activate(op.activation, wide, activated);
                round_row(activated, to.row(0));
            }
        });
    });
}
