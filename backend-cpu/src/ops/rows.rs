//! Moving rows.

use amphora_hal::ops::{Embed, GatherRows, WriteTokens};

use super::by_dtype;
use crate::{Cpu, CpuStream};

pub(super) fn write_tokens(device: &Cpu, s: &mut CpuStream, op: WriteTokens<'_, Cpu>) {
    let (access, _) = device.launch(s);
    let prompt = access.slice::<i32>(op.prompt.tensor());
    let first = op.table.sequences();
    let table = access.slice_mut::<i32>(op.table.index().tensor());
    table[first..][..prompt.len()].copy_from_slice(prompt);
}

pub(super) fn embed(device: &Cpu, s: &mut CpuStream, op: Embed<'_, Cpu>) {
    let (access, _) = device.launch(s);
    let index = access.slice::<i32>(op.index.tensor());
    let tokens = access.slice::<i32>(op.table.index().tensor());
    by_dtype!(op.weight, T => {
        let weight = access.read::<T>(op.weight);
        let mut out = access.write::<T>(op.out);
        for (row, &at) in index.iter().enumerate() {
            out.row(row).copy_from_slice(weight.row(tokens[at as usize] as usize));
        }
    });
}

pub(super) fn gather_rows(device: &Cpu, s: &mut CpuStream, op: GatherRows<'_, Cpu>) {
    let (access, _) = device.launch(s);
    let rows = access.slice::<i32>(op.rows.tensor());
    by_dtype!(op.x, T => {
        let x = access.read::<T>(op.x);
        let mut out = access.write::<T>(op.out);
        for (to, &from) in rows.iter().enumerate() {
            out.row(to).copy_from_slice(x.row(from as usize));
        }
    });
}
