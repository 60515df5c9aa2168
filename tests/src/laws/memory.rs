//! What operators with adapters meet in memory: workspace that was used before, an adapter's bytes that were
//! another's, rows of others that are no numbers. None of it shows.

use std::sync::Arc;

use amphora_hal::{Backend, DType};

use super::adapters::{Adapted, Law, Look, largest_rank};
use super::{Outcome, same_rows};
use crate::fixtures::{Adapters, Factors};
use crate::harness::{output, run};
use crate::host::{HostTensor, POISON};
use crate::packed::PackedAdapters;
use crate::rig::Rig;
use crate::rng::Rng;

/// Every slice of every expert in every slot at one rank. Of few different numbers, as nothing but the bits of
/// what comes out is looked at.
fn of_rank(like: &Adapters, rng: &mut Rng, rank: usize) -> Adapters {
    let mut adapters = Adapters::none(like.dtype, like.slots, &like.slices);
    let pool = rng.normals(4099, 0.125, like.dtype);
    for slot in 0..like.slots {
        for (slice, meta) in like.slices.iter().enumerate() {
            for expert in 0..meta.experts {
                let mut numbers = |len| {
                    let from = rng.below(pool.len());
                    pool.iter().cycle().skip(from).take(len).copied().collect::<Vec<f64>>()
                };
                let (a, b) = (Arc::new(numbers(rank * meta.k)), numbers(meta.n * rank));
                let factors = Factors { rank, scale: 0.5, least_class: 0, a, b };
                adapters.factors.insert((slot, slice, expert), factors);
            }
        }
    }
    adapters
}

/// Puts what is no number into the rows for which `spoils` holds.
fn spoil(x: &mut HostTensor, spoils: impl Fn(usize) -> bool) {
    let row = x.bytes.len() / x.dims[0];
    for (_, bytes) in x.bytes.chunks_mut(row).enumerate().filter(|(row, _)| spoils(*row)) {
        bytes.iter_mut().zip(POISON.iter().cycle()).for_each(|(to, poison)| *to = *poison);
    }
}

/// The workspace is full of what is no number: the same operator left it there, over adapters of the largest
/// rank everywhere.
///
/// # Errors
/// The first rows in which it shows.
pub fn used_workspace_does_not_show<B: Backend, H: Adapted>(
    device: &B,
    op: &H,
    rng: &mut Rng,
) -> Outcome {
    let live = op.steps()[0].rows();
    let largest = largest_rank(device.caps());
    let slots = op.adapters().slots;
    let mut before = op.with_adapters(of_rank(op.adapters(), rng, largest));
    before = before.with_slots(&op.live(|row| Some(row % slots)));
    spoil(before.x_mut(), |_| true);
    let bounds = [before.bounds(), op.bounds()].concat();
    let mut rig = Rig::new(device, before.bytes() + op.bytes(), &bounds)?;
    let (mut launch, mut first) = (op.place(&mut rig)?, before.place(&mut rig)?);
    run(&mut rig, &mut first, &before.steps()[0])?;
    let (_, after) = run(&mut rig, &mut launch, &op.steps()[0])?;
    let item = rig.items().iter().find(|item| item.name == "out");
    let out = item.expect("both operators have an out").of(&after);
    same_rows("in used workspace", &out, &output(device, op, "out")?, 0..live)
}

/// The slots' adapters are replaced by others of other ranks whose blocks lie where theirs did; where there are
/// graphs, under one captured graph.
///
/// # Errors
/// The first rows that are not as in memory of their own.
pub fn a_slot_takes_other_ranks_in_place<B: Backend, H: Adapted>(
    device: &B,
    op: &H,
    rng: &mut Rng,
) -> Outcome {
    let live = op.steps()[0].rows();
    let largest = largest_rank(device.caps());
    let first = op.with_adapters(of_rank(op.adapters(), rng, largest));
    let mut rig = Rig::new(device, first.bytes(), &first.bounds())?;
    let mut launch = first.place(&mut rig)?;
    let table = rig.tables()[0].clone();
    let mut look = Look::new(device, &mut rig, &mut launch, &first)?;
    look.out(&mut rig, &mut launch, &first)?;
    for rank in [1, largest.min(33), largest, 1] {
        let other = first.with_adapters(of_rank(op.adapters(), rng, rank));
        let packed = PackedAdapters::new(device, other.adapters())?;
        rig.write_blocks(&table, &packed.blocks)?;
        for slot in 0..table.slots() {
            rig.write_slot(&table, slot, &packed.slot_rows(other.adapters(), slot))?;
        }
        let out = look.out(&mut rig, &mut launch, &first)?;
        let what = format!("rank {rank} in place of another");
        same_rows(&what, &out, &output(device, &other, "out")?, 0..live)?;
    }
    Ok(())
}

/// What is no number in some rows, padding among them, stays in them.
///
/// # Errors
/// The first other rows that have other bits.
pub fn rows_without_numbers_stay_alone<B: Backend, H: Adapted>(
    device: &B,
    op: &H,
    _: &mut Rng,
) -> Outcome {
    let live = op.steps()[0].rows();
    let spoils = |row: usize| row % 3 == 1 || row >= live;
    let mut spoilt = op.clone();
    spoil(spoilt.x_mut(), spoils);
    let rows = (0..live).filter(|&row| !spoils(row));
    let (out, want) = (output(device, &spoilt, "out")?, output(device, op, "out")?);
    same_rows("beside rows without numbers", &out, &want, rows)
}

fn of_random<B: Backend, H: Adapted>(
    device: &B,
    (seed, purpose): (u64, &str),
    law: fn(&B, &H, &mut Rng) -> Outcome,
) -> Outcome {
    let mut rng = Rng::new(seed, purpose);
    let dtypes: &[DType] = device.caps().dtypes;
    for &dtype in dtypes {
        let op = H::random(&mut rng, device.caps(), false, dtype);
        law(device, &op, &mut rng)?;
    }
    Ok(())
}

pub(super) fn of<B: Backend, H: Adapted>() -> [(&'static str, Law<B>); 3] {
    [
        ("used_workspace_does_not_show", |device, seed| {
            of_random::<B, H>(device, (seed, "workspace"), used_workspace_does_not_show)
        }),
        ("a_slot_takes_other_ranks_in_place", |device, seed| {
            of_random::<B, H>(device, (seed, "in place"), a_slot_takes_other_ranks_in_place)
        }),
        ("rows_without_numbers_stay_alone", |device, seed| {
            of_random::<B, H>(device, (seed, "no numbers"), rows_without_numbers_stay_alone)
        }),
    ]
}
