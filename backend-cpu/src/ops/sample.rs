//! Drawing tokens.

use amphora_hal::SampleRow;
use amphora_hal::ops::Sample;

use crate::scratch::piece;
use crate::{Cpu, CpuStream};

/// An order of the vocabulary and its shares.
pub(super) fn workspace(vocab: usize) -> usize {
    piece::<u32>(vocab) + piece::<f64>(vocab)
}

pub(super) fn sample(device: &Cpu, s: &mut CpuStream, op: Sample<'_, Cpu>) {
    let (access, mut scratch) = device.launch(s);
    let slots = access.slice::<i32>(op.plan.sample_slot().tensor());
    let params: &[SampleRow] =
        bytemuck::cast_slice(access.slice::<i32>(op.plan.sampling().tensor()));
    let logits = access.read::<f32>(op.logits);
    let table = access.slice_mut::<i32>(op.table.index().tensor());
    let mut result = access.write::<i32>(op.result);
    let order = scratch.take::<u32>(logits.width());
    let shares = scratch.take::<f64>(logits.width());
    for (row, (&slot, params)) in slots.iter().zip(params).enumerate() {
        let Ok(slot) = usize::try_from(slot) else {
            continue;
        };
        let logits = logits.row(row);
        let token = if params.temperature == 0.0 {
            argmax(logits)
        } else {
            draw(logits, params, order, shares)
        };
        let logprob = if params.logprob == 0 { 0.0 } else { log_softmax(logits, token) };
        table[slot] = token as i32;
        result.row(row).copy_from_slice(&[token as i32, logprob.to_bits() as i32]);
    }
}

/// The largest, ties to the lower id.
fn argmax(logits: &[f32]) -> usize {
    let mut best = 0;
    for (id, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = id;
        }
    }
    best
}

fn log_softmax(logits: &[f32], token: usize) -> f32 {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f64 = logits.iter().map(|logit| f64::from(logit - most).exp()).sum();
    (f64::from(logits[token] - most) - total.ln()) as f32
}

fn draw(logits: &[f32], params: &SampleRow, order: &mut [u32], shares: &mut [f64]) -> usize {
    let temperature = params.temperature;
    let seed = u64::from(params.seed_high) << 32 | u64::from(params.seed_low);
    let u = f64::from(Sample::<Cpu>::uniform(seed, params.position));
    order.iter_mut().zip(0..).for_each(|(to, id)| *to = id);
    let before =
        |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    let kept = match params.top_k as usize {
        k if k > 0 && k < order.len() => {
            order.select_nth_unstable_by(k - 1, before);
            &mut order[..k]
        }
        _ => order,
    };
    kept.sort_unstable_by(before);
    let most = logits[kept[0] as usize];
    let mut total = 0.0;
    for (share, &id) in shares.iter_mut().zip(kept.iter()) {
        *share = f64::from((logits[id as usize] - most) / temperature).exp();
        total += *share;
    }
    let shares = &shares[..kept.len()];
    let reach = f64::from(params.top_p) * total;
    let mut mass = 0.0;
    let mut prefix = 0;
    while prefix < shares.len() && (prefix == 0 || mass < reach) {
        mass += shares[prefix];
        prefix += 1;
    }
    let mut running = 0.0;
    for (share, &id) in shares[..prefix].iter().zip(kept.iter()) {
        running += share;
        if running > u * mass {
            return id as usize;
        }
    }
    kept[prefix - 1] as usize
}
