//! Runs one operator call, given as host arrays, on a backend and holds it against the oracle.

use std::ops::Range;

use amphora_hal::{Backend, Caps, Ctx, Error, OpBounds, OpKey, PlanView, Returned, Support};

use crate::compare::{Tolerance, Want, compare, tolerance};
use crate::host::HostTensor;
use crate::rig::Rig;
use crate::rng::Rng;
use crate::step::Step;

/// Puts the operator on the stream: once eagerly for each plan, or once under capture.
pub type Launch<B> = Box<dyn FnMut(&mut Ctx<'_, B>, &PlanView<B>) -> amphora_hal::Result<()>>;

/// Judges a whole tensor.
pub type Judge = Box<dyn Fn(&HostTensor) -> Result<(), String>>;

/// What a tensor that the operator writes must hold.
pub enum Expect {
    /// Element by element.
    Elements(Vec<Want>),
    /// As this function finds, where more than one answer is right.
    Judged(Judge),
    /// Something that another case looks at.
    Free,
}

/// One operator call as host arrays, with everything the harness has to know about it.
pub trait HostOp {
    /// What a backend is asked for first; the first names the operator and the tolerance.
    fn keys(&self) -> Vec<OpKey>;

    /// Bounds of what runs, from which the stream's workspace is counted.
    fn bounds(&self) -> Vec<OpBounds>;

    /// The steps it runs with, all of one bucket.
    fn steps(&self) -> &[Step];

    /// Bytes of the buffer that holds all its tensors.
    fn bytes(&self) -> usize {
        1 << 19
    }

    /// The bound of its numbers.
    fn tolerance(&self) -> Tolerance {
        let key = self.keys()[0];
        tolerance(key.op, key.dtype)
    }

    /// Declares its tensors and gives the call.
    ///
    /// # Errors
    /// The backend's.
    fn place<B: Backend>(&self, rig: &mut Rig<B>) -> amphora_hal::Result<Launch<B>>;

    /// What the tensors it writes must hold after step number `step`, by name. All others must not
    /// change.
    fn expect(&self, step: usize) -> Vec<(&'static str, Expect)>;
}

/// An operator call that can be cut into its rows.
pub trait ByRow: HostOp + Sized {
    /// The tensors whose rows are compared: the operator's outputs.
    const OUTPUTS: &'static [&'static str];

    /// Live rows of the first step.
    fn rows(&self) -> usize;

    /// The call of some of its rows, in the given order, in a bucket without padding.
    #[must_use]
    fn of_rows(&self, rows: &[usize]) -> Self;
}

/// Why a case did not pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// The backend says that it lacks the operator.
    Unsupported(String),
    /// It is wrong.
    Wrong(String),
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Failure::Unsupported(what) => write!(f, "unsupported: {what}"),
            Failure::Wrong(what) => f.write_str(what),
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        match error {
            Error::Unsupported { .. } => Failure::Unsupported(error.to_string()),
            other => Failure::Wrong(other.to_string()),
        }
    }
}

impl<H> From<Returned<H>> for Failure {
    fn from(returned: Returned<H>) -> Self {
        returned.error.into()
    }
}

/// A test of one backend, given a seed.
pub type Test<B> = Box<dyn Fn(&B, u64) -> Result<(), Failure>>;

/// A named test of one backend.
pub struct Case<B: Backend> {
    /// `op/dtype/what`.
    pub name: String,
    /// The test.
    pub run: Test<B>,
}

/// A case that builds an operator call from random numbers and checks it.
pub fn case<B: Backend, H: HostOp>(
    name: String,
    make: impl Fn(&mut Rng, &Caps) -> H + 'static,
) -> Case<B> {
    let purpose = name.clone();
    Case {
        name,
        run: Box::new(move |device, seed| {
            check(device, &make(&mut Rng::new(seed, &purpose), device.caps()))
        }),
    }
}

/// Asks for every key of `op`.
///
/// # Errors
/// The backend's first refusal.
pub fn supported<B: Backend>(device: &B, op: &impl HostOp) -> Result<(), Failure> {
    for key in op.keys() {
        if let Support::No { reason } = device.supports(&key) {
            return Err(Failure::Unsupported(format!("{key}: {reason}")));
        }
    }
    Ok(())
}

/// Runs `op` with each of its steps and holds every byte of its memory against what it must be;
/// where the device has graphs, a replay must give the bits of the eager run.
///
/// # Errors
/// What is wrong, in a few words.
pub fn check<B: Backend>(device: &B, op: &impl HostOp) -> Result<(), Failure> {
    supported(device, op)?;
    let mut rig = Rig::new(device, op.bytes(), &op.bounds())?;
    let mut launch = op.place(&mut rig)?;
    let mut eager = Vec::new();
    for (number, step) in op.steps().iter().enumerate() {
        let at = |what: String| Failure::Wrong(format!("step {number}: {what}"));
        let (before, after) = run(&mut rig, &mut launch, step)?;
        if let Some(stray) = rig.stray_setup(&before) {
            return Err(at(format!("while packing or uploading: {stray}")));
        }
        let expectations = op.expect(number);
        hold(&rig, &before, &after, &expectations, op.tolerance()).map_err(at)?;
        eager.push((step, after, expectations));
    }
    if device.caps().graphs {
        replay(&mut rig, &mut launch, &eager)?;
    }
    Ok(())
}

/// The buffer before and after one eager run.
pub fn run<B: Backend>(
    rig: &mut Rig<B>,
    launch: &mut Launch<B>,
    step: &Step,
) -> amphora_hal::Result<(Vec<u8>, Vec<u8>)> {
    rig.reset()?;
    let view = rig.plan(step)?;
    let before = rig.snapshot()?;
    let device = rig.device().clone();
    launch(&mut Ctx { device: &device, stream: rig.stream() }, &view)?;
    Ok((before, rig.snapshot()?))
}

type Expectations = Vec<(&'static str, Expect)>;

fn hold<B: Backend>(
    rig: &Rig<B>,
    before: &[u8],
    after: &[u8],
    expectations: &Expectations,
    tolerance: Tolerance,
) -> Result<(), String> {
    for (name, expect) in expectations {
        let item = rig
            .items()
            .iter()
            .find(|item| item.name == *name)
            .ok_or_else(|| format!("the case expects {name}, which it did not place"))?;
        let held = match expect {
            Expect::Elements(wants) => compare(&item.of(before), &item.of(after), wants, tolerance),
            Expect::Judged(judge) => judge(&item.of(after)),
            Expect::Free => Ok(()),
        };
        held.map_err(|what| format!("{name}{what}"))?;
    }
    match rig.stray_write(before, after, &writable(rig, expectations)) {
        Some(stray) => Err(stray),
        None => Ok(()),
    }
}

fn writable<B: Backend>(rig: &Rig<B>, expectations: &Expectations) -> Vec<Range<usize>> {
    let written = |name: &str| expectations.iter().any(|(of, _)| *of == name);
    rig.items().iter().filter(|item| written(&item.name)).map(|item| item.range.clone()).collect()
}

/// Records the first step, then replays it with the plan of every step, the first one last.
fn replay<B: Backend>(
    rig: &mut Rig<B>,
    launch: &mut Launch<B>,
    eager: &[(&Step, Vec<u8>, Expectations)],
) -> Result<(), Failure> {
    let device = rig.device().clone();
    rig.reset()?;
    let view = rig.plan(eager[0].0)?;
    let before = rig.snapshot()?;
    let graph = device
        .capture(rig.stream(), |stream| launch(&mut Ctx { device: &device, stream }, &view))?;
    if rig.snapshot()? != before {
        return Err(Failure::Wrong("capturing ran the operator".to_owned()));
    }
    for number in (0..eager.len()).rev() {
        let (step, expected, expectations) = &eager[number];
        rig.reset()?;
        let view = rig.plan(step)?;
        device.replay(rig.stream(), &graph, &view)?;
        let after = rig.snapshot()?;
        for (name, expect) in expectations {
            let item = rig.items().iter().find(|item| item.name == *name);
            let item = item.expect("the eager run found it");
            let (got, want) = (item.of(&after), item.of(expected));
            let defined = |i: usize| match expect {
                Expect::Elements(wants) => wants[i] != Want::Any,
                Expect::Judged(_) | Expect::Free => true,
            };
            let size = item.dtype.size();
            let differs = |i: &usize| {
                let bytes = i * size..(i + 1) * size;
                defined(*i) && got.bytes[bytes.clone()] != want.bytes[bytes]
            };
            if let Some(i) = (0..got.elements()).find(differs) {
                return Err(Failure::Wrong(format!(
                    "replay with step {number}: element {i} of {name} is {}, eagerly {}",
                    got.value(i),
                    want.value(i)
                )));
            }
        }
        if let Some(stray) = rig.stray_write(expected, &after, &writable(rig, expectations)) {
            return Err(Failure::Wrong(format!("replay with step {number}: {stray}")));
        }
    }
    Ok(())
}

/// Every tensor after one eager run of step `step`, by name.
///
/// # Errors
/// The backend's.
pub fn outputs<B: Backend>(
    device: &B,
    op: &impl HostOp,
    step: usize,
) -> Result<Vec<(String, HostTensor)>, Failure> {
    supported(device, op)?;
    let mut rig = Rig::new(device, op.bytes(), &op.bounds())?;
    let mut launch = op.place(&mut rig)?;
    let (_, after) = run(&mut rig, &mut launch, &op.steps()[step])?;
    Ok(rig.items().iter().map(|item| (item.name.clone(), item.of(&after))).collect())
}

/// One tensor after one eager run of the first step.
///
/// # Errors
/// The backend's, or the case places no such tensor.
pub fn output<B: Backend>(device: &B, op: &impl HostOp, name: &str) -> Result<HostTensor, Failure> {
    let found = outputs(device, op, 0)?.into_iter().find(|(of, _)| of == name);
    found.map(|(_, tensor)| tensor).ok_or_else(|| Failure::Wrong(format!("no tensor {name}")))
}
