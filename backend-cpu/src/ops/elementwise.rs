//! Norms, rotary positions, and the activation of a dense MLP.

use amphora_hal::ops::{RmsNorm, Rope, Swiglu};

use super::attention;
use super::{ELEMENT_COST, by_dtype, by_rows};
use crate::memory::RowsMut;
use crate::scratch::piece;
use crate::simd::{self, Turn};
use crate::threads::ranges;
use crate::{Cpu, CpuStream};

pub(super) fn rms_norm(device: &Cpu, s: &mut CpuStream, op: RmsNorm<'_, Cpu>) {
    let (access, _) = device.launch(s);
    let level = device.0.level;
    let weight = access.slice::<f32>(op.weight);
    by_dtype!(op.x, T => {
        let in_place = op.out.is_same(op.x);
        let out = access.write::<T>(op.out);
        let cost = ELEMENT_COST * out.width();
        let normalise = |to: &mut [T]| {
            to.chunks_mut(weight.len()).for_each(|head| simd::rms(level, op.eps, weight, head));
        };
        if in_place {
            // There is no `add` then, and x is viewed as the output alone.
            let nothing = RowsMut::<u8>::of_nothing(out.len());
            by_rows(device, cost, (nothing, out), |_, _, to| normalise(to));
            return;
        }
        let add = op.add.map(|add| access.read::<T>(add));
        by_rows(device, cost, (access.write::<T>(op.x), out), |row, x, to| {
            if let Some(add) = &add {
                simd::add(level, add.row(row), x);
            }
            to.copy_from_slice(x);
            normalise(to);
        });
    });
}

pub(super) fn rope(device: &Cpu, s: &mut CpuStream, op: Rope<'_, Cpu>) {
    let (access, _) = device.launch(s);
    let level = device.0.level;
    let position = access.slice::<i32>(op.position.tensor());
    let table = access.read::<f32>(op.table);
    let q_scale = op.q_scale.map(|scale| access.slice::<f32>(scale));
    let dim = op.q.dims()[2];
    by_dtype!(op.q, T => {
        let (q, k) = (access.write::<T>(op.q), access.write::<T>(op.k));
        let cost = ELEMENT_COST * (q.width() + k.width());
        by_rows(device, cost, (q, k), |row, q, k| {
            let position = position[row] as usize;
            let table = table.row(position);
            let (cos, sin) = table.split_at(table.len() / 2);
            let plain = Turn { pairing: op.pairing, cos, sin, scale: 1.0 };
            let scaled = Turn { scale: q_scale.map_or(1.0, |scale| scale[position]), ..plain };
            q.chunks_mut(dim).for_each(|head| simd::turn(level, scaled, head));
            k.chunks_mut(dim).for_each(|head| simd::turn(level, plain, head));
        });
    });
    if let Some(to) = &op.store {
        attention::store(&access, op.k, to);
    }
}

/// What an exponential and a division cost, in multiply-adds.
const ACTIVATION_COST: usize = 16;

/// A widened row of `width` for each thread.
pub(super) fn swiglu_workspace(width: usize, threads: usize) -> usize {
    threads * piece::<f32>(width)
}

pub(super) fn swiglu(device: &Cpu, s: &mut CpuStream, op: Swiglu<'_, Cpu>) {
    let (access, mut scratch) = device.launch(s);
    let [rows, inner] = [op.out.dims()[0], op.out.dims()[1]];
    if inner == 0 {
        return;
    }
    by_dtype!(op.x, T => {
        let x = access.read::<T>(op.x);
        let mut left = access.write::<T>(op.out);
        let parts = device.0.threads.parts(rows * inner * ACTIVATION_COST);
        let mut tasks = Vec::with_capacity(parts);
        for range in ranges(rows, parts, 1) {
            let (part, rest) = left.split_rows(range.len());
            left = rest;
            tasks.push((range, part));
        }
        let wide = tasks.iter().map(|_| scratch.take::<f32>(2 * inner)).collect();
        device.0.threads.run_with(wide, tasks, |wide, (range, mut out)| {
            for (i, row) in range.enumerate() {
                simd::widen(device.0.level, x.row(row), wide);
                simd::activate(device.0.level, op.activation, wide, out.row(i));
            }
        });
    });
}
