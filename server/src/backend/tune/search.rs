//! The search: for each operator, shape and number of rows, every choice that is possible there against
//! the heuristic's.

use std::time::{Duration, Instant};

use amphora_engine::measure::dense::{self, Projection};
use amphora_engine::measure::experts::{self, Extent, Layer};
use amphora_engine::measure::{CAREFUL, Effort, Pattern, in_turn};
use amphora_hal::{Device, Error};
use anyhow::bail;

use super::super::Cuda;
use super::super::tuning::operators::DensePath;
use super::super::tuning::{
    DeltaUse, DenseUse, Element, Entry, ExpertsUse, Measured, Operator, RouteUse, When,
};
use super::files::{Found, gpu};
use super::shapes::Shapes;
use crate::cli::TuneArgs;
use crate::console::Voice;

/// Copies of the layer of experts: of each, a step of one token reads more than a cache holds.
const LAYERS: usize = 3;
/// A choice must gain so much, in both comparisons: less is noise.
const GAIN: f64 = 0.98;
const QUICK: Effort = Effort {
    rounds: 3,
    most: Duration::from_millis(150),
    turn: Duration::from_micros(600),
    rest: Duration::ZERO,
};
const SURE: Effort = Effort { rounds: 11, most: Duration::from_millis(300), ..CAREFUL };

type Graph = <Cuda as Device>::Graph;

/// One operator's calls of one shape and number of rows.
trait Calls {
    /// A graph for each kind of call whose time counts, through a handle of the device.
    fn graphs(&mut self, device: &Cuda) -> amphora_hal::Result<Vec<Graph>>;
    /// The median microseconds of each graph, in turns.
    fn times(&mut self, graphs: &[Graph], effort: Effort) -> amphora_hal::Result<Vec<f64>>;
}

/// A layer of experts with rows.
struct Experts<'a> {
    layer: &'a mut Layer<Cuda>,
    rows: &'a mut experts::Rows<Cuda>,
    calls: &'a [experts::Call],
}

impl Calls for Experts<'_> {
    fn graphs(&mut self, device: &Cuda) -> amphora_hal::Result<Vec<Graph>> {
        self.layer.device = device.clone();
        let of = |&call| {
            // What is made when it is first used is made before it is recorded.
            self.layer.run(self.rows, 0, call)?;
            self.layer.capture(self.rows, call)
        };
        self.calls.iter().map(of).collect()
    }

    fn times(&mut self, graphs: &[Graph], effort: Effort) -> amphora_hal::Result<Vec<f64>> {
        self.layer.times(self.rows, graphs, effort)
    }
}

/// A projection with rows.
struct Dense<'a> {
    projection: &'a mut Projection<Cuda>,
    rows: &'a mut dense::Rows<Cuda>,
    calls: &'a [dense::Call],
}

impl Calls for Dense<'_> {
    fn graphs(&mut self, device: &Cuda) -> amphora_hal::Result<Vec<Graph>> {
        self.projection.device = device.clone();
        self.calls.iter().map(|&call| self.projection.capture(self.rows, call)).collect()
    }

    fn times(&mut self, graphs: &[Graph], effort: Effort) -> amphora_hal::Result<Vec<f64>> {
        self.projection.times(self.rows, graphs, effort)
    }
}

/// A search under way.
struct Search<'a> {
    device: &'a Cuda,
    /// Files that are written beside: in force while others are searched.
    found: &'a mut Found,
    end: Instant,
    /// Calls that there was no time for.
    left: usize,
    /// Operators that are searched; all if none is named.
    operators: &'a [String],
}

/// The operators that are searched.
const SEARCHED: [&str; 4] = [RouteUse::NAME, ExpertsUse::NAME, DenseUse::NAME, DeltaUse::NAME];

/// Searches everything, as far as the budget reaches, and says a line for each call.
pub fn search(
    device: &Cuda,
    shapes: &Shapes,
    args: &TuneArgs,
    found: &mut Found,
) -> anyhow::Result<()> {
    let budget = Duration::from_secs(args.budget);
    let begin = Instant::now();
    let pattern = Pattern::new();
    let operators = &args.operators;
    if let Some(unknown) = operators.iter().find(|name| !SEARCHED.contains(&name.as_str())) {
        bail!("--operators {unknown}: expected some of {}", SEARCHED.join(", "));
    }
    let end = begin + budget;
    let mut search = Search { device, found, end, left: 0, operators };
    Voice::Out.line(format_args!(
        "{:<12} {:<66} {:>12} {:>9}  choice",
        "operator", "calls", "heuristic µs", "best µs"
    ))?;
    let experts = search.wants::<RouteUse>() || search.wants::<ExpertsUse>();
    if let Some(model) = shapes.experts.filter(|_| experts) {
        // Half of the time: most of a step is theirs.
        search.end = begin + budget / 2;
        let tokens = args.max_batch_tokens;
        let extent = Extent { slots: args.adapters, sets: LAYERS, tokens };
        let mut layer = Layer::new(device, model, extent, &pattern)?;
        for &tokens in &shapes.tokens {
            search.experts(&mut layer, tokens, args.adapters)?;
        }
    }
    let mut of = shapes.projections.iter().collect::<Vec<_>>();
    of.push(&shapes.head);
    if !search.wants::<DenseUse>() && !search.wants::<DeltaUse>() {
        of.clear();
    }
    let roomy = with_room(device);
    for (i, shape) in of.iter().enumerate() {
        let now = Instant::now();
        let rest = (begin + budget).saturating_duration_since(now);
        search.end = now + rest / (of.len() - i) as u32;
        let head = i + 1 == of.len();
        let slots = args.adapters;
        let mut projection = Projection::new(&roomy, (*shape).clone(), slots, &pattern)?;
        for &tokens in shapes.tokens.iter().filter(|&&tokens| tokens <= shape.tokens) {
            search.projection(&mut projection, shape, tokens, head)?;
        }
    }
    let seconds = begin.elapsed().as_secs_f64();
    let left = match search.left {
        0 => "all calls were searched".to_owned(),
        left => format!("{left} calls were left out: --budget was {} s", args.budget),
    };
    Voice::Out.line(format_args!("{seconds:.0} s; {left}"))?;
    Ok(())
}

/// A handle through which a stream gets the workspace that any choice of a product takes.
fn with_room(device: &Cuda) -> Cuda {
    let choice = DenseUse::new(DensePath::Library);
    let entry = Entry { when: When::default(), choice: Some(choice), measured: None };
    let mut tuning = device.choices();
    tuning.put_first(Found::file(gpu(device), entry));
    device.with_tuning(tuning)
}

impl Search<'_> {
    fn wants<U: Operator>(&self) -> bool {
        self.operators.is_empty() || self.operators.iter().any(|name| name == U::NAME)
    }

    fn experts(
        &mut self,
        layer: &mut Layer<Cuda>,
        tokens: usize,
        slots: usize,
    ) -> anyhow::Result<()> {
        let model = layer.model;
        let logits: Vec<Vec<f32>> =
            (0..LAYERS).map(|set| model.random_logits(tokens, set as u64)).collect();
        let mut rows = experts::Rows::new(layer, &in_turn(tokens, slots), &logits)?;
        let route = When {
            tokens: Some(tokens),
            experts: Some(model.experts),
            top_k: Some(model.top_k),
            ..When::default()
        };
        let calls = &[experts::Call::Route];
        self.choose::<RouteUse>(route, &mut Experts { layer, rows: &mut rows, calls })?;
        let products = When {
            k: Some(model.hidden),
            inner: Some(model.inner),
            dtype: Some(Element::Bf16),
            ..route
        };
        let calls = &[experts::Call::Base, experts::Call::Lora];
        self.choose::<ExpertsUse>(products, &mut Experts { layer, rows: &mut rows, calls })
    }

    fn projection(
        &mut self,
        projection: &mut Projection<Cuda>,
        shape: &dense::Shape,
        tokens: usize,
        head: bool,
    ) -> anyhow::Result<()> {
        let mut rows = projection.rows(&in_turn(tokens, projection.slots))?;
        let when = When {
            tokens: Some(tokens),
            k: Some(shape.k),
            n: Some(shape.n()),
            dtype: Some(Element::Bf16),
            ..When::default()
        };
        let (base, both) = ([dense::Call::Base], [dense::Call::Base, dense::Call::Lora]);
        let calls: &[_] = if head { &base } else { &both };
        let rows = &mut rows;
        self.choose::<DenseUse>(when, &mut Dense { projection, rows, calls })?;
        if head {
            return Ok(());
        }
        let calls = &[dense::Call::Lora];
        self.choose::<DeltaUse>(when, &mut Dense { projection, rows, calls })
    }

    /// Tries every choice for one call, keeps the best if it gains, and says so.
    fn choose<U: Operator>(&mut self, when: When, calls: &mut impl Calls) -> anyhow::Result<()> {
        if !self.wants::<U>() {
            return Ok(());
        }
        if Instant::now() >= self.end {
            self.left += 1;
            return Ok(());
        }
        let mut possible = vec![None];
        possible.extend(U::possible(&when, self.device.limits()).into_iter().map(Some));
        let (choices, times) = self.compare(when, &possible, calls, QUICK)?;
        let best = (1..times.len()).min_by(|&a, &b| times[a].total_cmp(&times[b]));
        let mut took = Measured { microseconds: times[0], heuristic: times[0] };
        let mut choice = None;
        if let Some(best) = best.filter(|&best| times[best] < GAIN * times[0]) {
            // The least of many is partly luck: once more, alone with the heuristic's.
            let pair = [None, choices[best].clone()];
            let (_, again) = self.compare(when, &pair, calls, SURE)?;
            took = Measured { microseconds: again[0], heuristic: again[0] };
            if again.len() == 2 && again[1] < GAIN * again[0] {
                took.microseconds = again[1];
                choice = choices[best].clone();
            }
        }
        let said = match &choice {
            Some(choice) => serde_json::to_string(choice)?,
            None => "the heuristic's".to_owned(),
        };
        Voice::Out.line(format_args!(
            "{:<12} {:<66} {:>12.2} {:>9.2}  {said}",
            U::NAME,
            serde_json::to_string(&when)?,
            took.heuristic,
            took.microseconds
        ))?;
        self.found.add(gpu(self.device), Entry { when, choice, measured: Some(took) })
    }

    /// The choices that run, the first of `choices` among them, and what one of each kind of calls takes
    /// with them together.
    fn compare<U: Operator>(
        &self,
        when: When,
        choices: &[Option<U>],
        calls: &mut impl Calls,
        effort: Effort,
    ) -> anyhow::Result<(Vec<Option<U>>, Vec<f64>)> {
        let base = self.found.tuning(self.device);
        let (mut run, mut graphs, mut each) = (Vec::new(), Vec::new(), 1);
        for choice in choices {
            let entry = Entry { when, choice: choice.clone(), measured: None };
            let mut tuning = base.clone();
            tuning.put_first(Found::file(gpu(self.device), entry));
            match calls.graphs(&self.device.with_tuning(tuning)) {
                Ok(made) => {
                    each = made.len();
                    graphs.extend(made);
                    run.push(choice.clone());
                }
                // What does not compile or launch is no choice; the heuristic's is needed.
                Err(error) if run.is_empty() || matches!(error, Error::Lost { .. }) => {
                    return Err(error.into());
                }
                Err(error) => {
                    Voice::Err.line(format_args!("{} {choice:?}: {error}", U::NAME))?;
                }
            }
        }
        let times = calls.times(&graphs, effort)?;
        Ok((run, times.chunks(each).map(|of| of.iter().sum()).collect()))
    }
}
