//! What adapters may change, and what they must leave alone.

use std::sync::Arc;

use amphora_hal::{Backend, Caps, Ctx, DType, LoraRow};

use super::{Outcome, memory, near, same_rows, wrong};
use crate::cases::fused_moe::{HostMoe, MoeSpec, Touch as MoeTouch};
use crate::cases::linear::LinearSpec;
use crate::cases::lora_linear::{Cut, HostLoraLinear, LoraLinearSpec, Touch};
use crate::compare::{Tolerance, tolerance};
use crate::fixtures::{Adapters, deltas, merged};
use crate::harness::{Case, Failure, HostOp, Launch, output, run};
use crate::host::HostTensor;
use crate::oracle::lora_linear::Delta;
use crate::packed::PackedAdapters;
use crate::rig::Rig;
use crate::rng::Rng;

/// The two operators that take adapters, as the laws see them.
pub trait Adapted: HostOp + Clone {
    /// A call of random sizes.
    fn random(rng: &mut Rng, caps: &Caps, shared_a: bool, dtype: DType) -> Self;
    /// The table's.
    fn adapters(&self) -> &Adapters;
    /// The same call with other adapters in the table.
    fn with_adapters(&self, adapters: Adapters) -> Self;
    /// The same call with every row's adapter as given.
    fn with_slots(&self, slots: &[Option<usize>]) -> Self;
    /// Its input, a row for each of the bucket.
    fn x_mut(&mut self) -> &mut HostTensor;
    /// The same rows through the operator that knows no adapters.
    ///
    /// # Errors
    /// The backend's.
    fn base<B: Backend>(&self, device: &B) -> Result<HostTensor, Failure>;
    /// The operator on weights with the adapter of `slot` merged in, no row having one.
    fn merged(&self, slot: usize) -> Self;

    /// The adapter of each row.
    fn slots(&self) -> Vec<Option<usize>> {
        self.steps()[0].slots()
    }

    /// The adapter of each live row, from a function of the row's number.
    fn live(&self, of: impl FnMut(usize) -> Option<usize>) -> Vec<Option<usize>> {
        (0..self.steps()[0].rows()).map(of).collect()
    }
}

impl Adapted for HostLoraLinear {
    fn random(rng: &mut Rng, caps: &Caps, shared_a: bool, dtype: DType) -> Self {
        let base = LinearSpec { bias: true, ..LinearSpec::new(1 + rng.below(40), 72, 60, dtype) };
        let touch = if shared_a { Touch::SharedA } else { Touch::MixedRanks };
        let (padding, rank) = (rng.below(5), 1 + rng.below(24));
        let cut = rng.pick(&[Cut::Qkv, Cut::Interleaved]);
        let spec = LoraLinearSpec { cut, touch, padding, ..LoraLinearSpec::new(base, rank, 4) };
        HostLoraLinear::random(rng, caps, spec)
    }

    fn adapters(&self) -> &Adapters {
        &self.adapters
    }

    fn with_adapters(&self, adapters: Adapters) -> Self {
        HostLoraLinear::with_adapters(self, adapters)
    }

    fn with_slots(&self, slots: &[Option<usize>]) -> Self {
        HostLoraLinear::with_slots(self, slots)
    }

    fn x_mut(&mut self) -> &mut HostTensor {
        &mut self.base.x
    }

    fn base<B: Backend>(&self, device: &B) -> Result<HostTensor, Failure> {
        output(device, &self.base, "out")
    }

    fn merged(&self, slot: usize) -> Self {
        let mut op = self.with_slots(&self.live(|_| None));
        op.base.weight = merged(&self.base.weight, &deltas(&self.adapters, &self.places), slot);
        op
    }
}

impl Adapted for HostMoe {
    fn random(rng: &mut Rng, caps: &Caps, shared_a: bool, dtype: DType) -> Self {
        let touch = if shared_a { MoeTouch::SharedA } else { MoeTouch::Ragged };
        let rows = 1 + rng.below(40);
        let spec = MoeSpec {
            padding: rng.below(5),
            clamped: rng.below(2) == 0,
            ..MoeSpec::new(rows, 6, 2, dtype)
        };
        let spec = spec.lora(4, 1 + rng.below(24), touch);
        HostMoe::random(rng, caps, spec)
    }

    fn adapters(&self) -> &Adapters {
        self.adapters.as_ref().expect("made with adapters")
    }

    fn with_adapters(&self, adapters: Adapters) -> Self {
        HostMoe::with_adapters(self, Some(adapters))
    }

    fn with_slots(&self, slots: &[Option<usize>]) -> Self {
        HostMoe::with_slots(self, slots)
    }

    fn x_mut(&mut self) -> &mut HostTensor {
        &mut self.x
    }

    fn base<B: Backend>(&self, device: &B) -> Result<HostTensor, Failure> {
        output(device, &HostMoe::with_adapters(self, None), "out")
    }

    fn merged(&self, slot: usize) -> Self {
        let of = |places: &[_]| -> Vec<Delta> { deltas(self.adapters(), places) };
        let mut op = self.with_slots(&self.live(|_| None));
        op.gate_up = merged(&self.gate_up, &of(&self.gate_up_places()), slot);
        op.down = merged(&self.down, &of(&self.down_places()), slot);
        op
    }
}

fn rows_without(slots: &[Option<usize>], live: usize) -> Vec<usize> {
    (0..live).filter(|&row| slots[row].is_none()).collect()
}

/// A row without an adapter has the bits of the base operator, of an empty table, and of the same batch
/// in which the others' adapters are other ones or have weights of zero.
///
/// # Errors
/// The first rows that have not.
pub fn base_rows_of<B: Backend, H: Adapted>(device: &B, op: &H, rng: &mut Rng) -> Outcome {
    let live = op.steps()[0].rows();
    let out = output(device, op, "out")?;
    let base = op.base(device)?;
    let none = rows_without(&op.slots(), live);
    same_rows("against the base operator", &out, &base, none.clone())?;
    let empty = Adapters { factors: Default::default(), ..op.adapters().clone() };
    let empty = output(device, &op.with_adapters(empty), "out")?;
    same_rows("an empty table against the base operator", &empty, &base, 0..live)?;
    let mut zeroed = op.adapters().clone();
    for factors in zeroed.factors.values_mut() {
        factors.a = Arc::new(vec![0.0; factors.a.len()]);
        factors.b.fill(0.0);
    }
    let zeroed = output(device, &op.with_adapters(zeroed), "out")?;
    same_rows("with the adapters' weights zeroed", &out, &zeroed, none.clone())?;
    let fewer = op.with_adapters(op.adapters().without(|(slot, _, _)| slot % 2 == 0));
    same_rows("with half of the adapters", &output(device, &fewer, "out")?, &base, none)?;
    let (slots, count) = (op.slots(), op.adapters().slots);
    let others = op.live(|row| slots[row].map(|_| rng.below(count)));
    let moved = output(device, &op.with_slots(&others), "out")?;
    same_rows("with other adapters beside", &moved, &base, rows_without(&slots, live))
}

fn base_rows_are_untouched<B: Backend, H: Adapted>(device: &B, seed: u64) -> Outcome {
    let mut rng = Rng::new(seed, "base rows");
    for &dtype in device.caps().dtypes {
        let op = H::random(&mut rng, device.caps(), false, dtype);
        base_rows_of(device, &op, &mut rng)?;
    }
    Ok(())
}

/// Which other adapters share the table and the batch does not show in an adapter's own rows.
///
/// # Errors
/// The first rows in which it does.
pub fn each_adapter_alone<B: Backend, H: Adapted>(device: &B, op: &H) -> Outcome {
    let out = output(device, op, "out")?;
    let slots = op.slots();
    for slot in 0..op.adapters().slots {
        let own = op.with_adapters(op.adapters().without(|(of, _, _)| *of != slot));
        let rows = (0..op.steps()[0].rows()).filter(|&row| slots[row] == Some(slot));
        same_rows("with its adapter alone", &output(device, &own, "out")?, &out, rows)?;
    }
    Ok(())
}

fn adapters_do_not_see_each_other<B: Backend, H: Adapted>(device: &B, seed: u64) -> Outcome {
    let mut rng = Rng::new(seed, "adapters alone");
    for &dtype in device.caps().dtypes {
        each_adapter_alone(device, &H::random(&mut rng, device.caps(), false, dtype))?;
    }
    Ok(())
}

/// Equal as numbers, −0 being 0.
fn a_zero_adapter_equals_none<B: Backend, H: Adapted>(device: &B, seed: u64) -> Outcome {
    let mut rng = Rng::new(seed, "zero adapter");
    for &dtype in device.caps().dtypes {
        let op = H::random(&mut rng, device.caps(), false, dtype);
        let live: Vec<usize> = (0..op.steps()[0].rows()).collect();
        let base = op.base(device)?.of_rows(&live);
        for zero_a in [false, true] {
            let mut adapters = op.adapters().clone();
            for factors in adapters.factors.values_mut() {
                match zero_a {
                    true => factors.a = Arc::new(vec![0.0; factors.a.len()]),
                    false => factors.b.fill(0.0),
                }
            }
            let out = output(device, &op.with_adapters(adapters), "out")?.of_rows(&live);
            near("zero adapters against none", &out, &base, Tolerance::EXACT)?;
        }
    }
    Ok(())
}

/// In f32: merging rounds the sum of weight and delta, which only f32 hides in the tolerance.
fn one_adapter_equals_merged_weights<B: Backend, H: Adapted>(device: &B, seed: u64) -> Outcome {
    if !device.caps().dtypes.contains(&DType::F32) {
        return Ok(());
    }
    let op = H::random(&mut Rng::new(seed, "merged"), device.caps(), false, DType::F32);
    let live: Vec<usize> = (0..op.steps()[0].rows()).collect();
    for slot in 0..op.adapters().slots {
        let one = output(device, &op.with_slots(&op.live(|_| Some(slot))), "out")?;
        let merged = output(device, &op.merged(slot), "out")?;
        let what = format!("slot {slot} against merged weights");
        near(&what, &one.of_rows(&live), &merged.of_rows(&live), op.tolerance())?;
    }
    Ok(())
}

/// A rank stored in a larger class, and an A stored twice instead of shared, change nothing.
fn storage_does_not_matter<B: Backend, H: Adapted>(device: &B, seed: u64) -> Outcome {
    let mut rng = Rng::new(seed, "storage");
    let largest = largest_rank(device.caps());
    for &dtype in device.caps().dtypes {
        let op = H::random(&mut rng, device.caps(), true, dtype);
        let live: Vec<usize> = (0..op.steps()[0].rows()).collect();
        let out = output(device, &op, "out")?.of_rows(&live);
        let (mut wider, mut apart) = (op.adapters().clone(), op.adapters().clone());
        for factors in wider.factors.values_mut() {
            let class = device.caps().rank_class(factors.rank).map_or(0, |class| class.get());
            factors.least_class = (class + 1).min(largest);
        }
        for factors in apart.factors.values_mut() {
            factors.a = Arc::new(factors.a.to_vec());
        }
        for (what, adapters) in [("the next class up", wider), ("A stored apart", apart)] {
            let other = output(device, &op.with_adapters(adapters), "out")?.of_rows(&live);
            near(what, &other, &out, op.tolerance())?;
        }
    }
    Ok(())
}

/// Rows of the table appear and vanish between two runs, by one copy each; where there are graphs,
/// under one captured graph.
fn a_slot_appears_and_vanishes_alone<B: Backend, H: Adapted>(device: &B, seed: u64) -> Outcome {
    let op =
        H::random(&mut Rng::new(seed, "visible"), device.caps(), false, device.caps().dtypes[0]);
    let (live, slots) = (op.steps()[0].rows(), op.slots());
    let full = output(device, &op, "out")?;
    let base = op.base(device)?;
    let packed = PackedAdapters::new(device, op.adapters())?;
    let mut rig = Rig::new(device, op.bytes(), &op.bounds())?;
    let mut launch = op.place(&mut rig)?;
    let table = rig.tables()[0].clone();
    let nothing = vec![LoraRow::default(); table.layout().rows()];
    for slot in 0..table.slots() {
        rig.write_slot(&table, slot, &nothing)?;
    }
    let mut look = Look::new(device, &mut rig, &mut launch, &op)?;
    same_rows("with no slot written", &look.out(&mut rig, &mut launch, &op)?, &base, 0..live)?;
    for slot in 0..table.slots() {
        let copies = device.counters().uploads;
        rig.write_slot(&table, slot, &packed.slot_rows(op.adapters(), slot))?;
        if device.counters().uploads != copies + 1 {
            return wrong("a slot became visible by other than one copy");
        }
        let out = look.out(&mut rig, &mut launch, &op)?;
        let (own, others): (Vec<_>, Vec<_>) = (0..live).partition(|&row| slots[row] == Some(slot));
        same_rows("its own rows", &out, &full, own)?;
        same_rows("the rows of others", &out, &base, others)?;
        rig.write_slot(&table, slot, &nothing)?;
        same_rows("once it has gone", &look.out(&mut rig, &mut launch, &op)?, &base, 0..live)?;
    }
    Ok(())
}

/// The largest rank that a device has a class for.
pub(super) fn largest_rank(caps: &Caps) -> usize {
    caps.rank_classes.last().map_or(0, |class| class.get())
}

/// Runs an operator again and again: eagerly, or by one graph where there are graphs.
pub(super) enum Look<B: Backend> {
    Eager,
    Graph(B::Graph),
}

impl<B: Backend> Look<B> {
    pub(super) fn new(
        device: &B,
        rig: &mut Rig<B>,
        launch: &mut Launch<B>,
        op: &impl HostOp,
    ) -> Result<Self, Failure> {
        if !device.caps().graphs {
            return Ok(Look::Eager);
        }
        rig.reset()?;
        let view = rig.plan(&op.steps()[0])?;
        let captured =
            device.capture(rig.stream(), |stream| launch(&mut Ctx { device, stream }, &view));
        Ok(Look::Graph(captured?))
    }

    pub(super) fn out(
        &mut self,
        rig: &mut Rig<B>,
        launch: &mut Launch<B>,
        op: &impl HostOp,
    ) -> Result<HostTensor, Failure> {
        let step = &op.steps()[0];
        let after = match self {
            Look::Eager => run(rig, launch, step)?.1,
            Look::Graph(graph) => {
                rig.reset()?;
                let view = rig.plan(step)?;
                let device = rig.device().clone();
                device.replay(rig.stream(), graph, &view)?;
                rig.snapshot()?
            }
        };
        let item = rig.items().iter().find(|item| item.name == "out");
        Ok(item.expect("both operators have an out").of(&after))
    }
}

/// The tolerance that a law leans on is tight enough to notice a lost delta.
fn deltas_are_large<B: Backend, H: Adapted>(device: &B, seed: u64) -> Outcome {
    let op = H::random(&mut Rng::new(seed, "large"), device.caps(), true, device.caps().dtypes[0]);
    let one = output(device, &op.with_slots(&op.live(|_| Some(0))), "out")?;
    let live: Vec<usize> = (0..op.steps()[0].rows()).collect();
    let base = op.base(device)?.of_rows(&live);
    let key = op.keys()[0];
    match near("", &one.of_rows(&live), &base, tolerance(key.op, key.dtype)) {
        Ok(()) => wrong("an adapter is lost in the tolerance"),
        Err(_) => Ok(()),
    }
}

pub(super) type Law<B> = fn(&B, u64) -> Outcome;

fn of<B: Backend, H: Adapted>() -> [(&'static str, Law<B>); 7] {
    [
        ("base_rows_are_untouched", base_rows_are_untouched::<B, H>),
        ("adapters_do_not_see_each_other", adapters_do_not_see_each_other::<B, H>),
        ("a_zero_adapter_equals_none", a_zero_adapter_equals_none::<B, H>),
        ("one_adapter_equals_merged_weights", one_adapter_equals_merged_weights::<B, H>),
        ("storage_does_not_matter", storage_does_not_matter::<B, H>),
        ("a_slot_appears_and_vanishes_alone", a_slot_appears_and_vanishes_alone::<B, H>),
        ("deltas_are_large", deltas_are_large::<B, H>),
    ]
}

pub(super) fn laws<B: Backend>() -> Vec<Case<B>> {
    let linear = of::<B, HostLoraLinear>().into_iter().chain(memory::of::<B, HostLoraLinear>());
    let linear = linear.map(|(name, law)| ("lora_linear", name, law));
    let moe = of::<B, HostMoe>().into_iter().chain(memory::of::<B, HostMoe>());
    let moe = moe.map(|(name, law)| ("fused_moe_lora", name, law));
    let make = |(op, name, law): (&str, &str, Law<B>)| Case {
        name: format!("laws/{op}/{name}"),
        run: Box::new(law),
    };
    linear.chain(moe).map(make).collect()
}
