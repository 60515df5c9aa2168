//! `--profile`: where the time of a step goes, kernel by kernel, beside the time of the step as it is served.
//!
//! Pieces are timed one behind the other, each with the device's own time for taking it (about 2.4 us on an
//! H200). As served, they begin while others end, and the device goes
//! from one to the next without a time being taken: how much less the last row is than the one above it.

use std::collections::BTreeMap;
use std::time::Duration;

use amphora_engine::{EngineHandle, Profiling, StepProfile};
use amphora_hal::{OpKind, Part};

use super::round::{self, Load};
use crate::console::Voice;

/// Steps behind the last prompt that are looked at.
const DECODE_STEPS: usize = 8;

/// Runs the load twice, shortened, and prints a table of a step with the most prompt tokens and one of a
/// step that decodes for all streams. `batch` is the most tokens of a step.
pub fn run(engine: &EngineHandle, load: &Load<'_>, batch: usize) -> anyhow::Result<()> {
    // Streams whose prompts were first go on while the others' are computed.
    let prompts = (load.streams * load.prompt).div_ceil(batch.saturating_sub(load.streams).max(1));
    let load = Load { answer: load.answer.min(prompts + DECODE_STEPS), ..*load };
    let steps = |how| -> anyhow::Result<Vec<StepProfile>> {
        let profiles = engine.profile(how);
        round::run(engine, &load)?;
        engine.settle();
        Ok(profiles.try_iter().collect())
    };
    let (served, parts) = (steps(Profiling::AsServed)?, steps(Profiling::Parts)?);
    let with = if load.tenants.adapters(load.streams) > 0 { "adapters" } else { "no adapter" };
    for (name, decodes) in [("prompt", false), ("decode", true)] {
        let [served, parts] = [&served, &parts].map(|steps| largest(steps, decodes));
        let Some(first) = parts.first() else { continue };
        Voice::Out.line(format_args!(
            "\n{name} step, {}: {} tokens, {} sequences\n{}",
            with,
            first.tokens,
            first.sequences,
            Table::new(&served, &parts)
        ))?;
    }
    Ok(())
}

/// Of the steps that only decode, or that compute prompts, those with the most tokens.
fn largest(steps: &[StepProfile], decodes: bool) -> Vec<&StepProfile> {
    let of_kind = |step: &&StepProfile| (step.tokens == step.sequences) == decodes;
    let most = steps.iter().filter(of_kind).map(|step| step.tokens).max();
    steps.iter().filter(of_kind).filter(|step| Some(step.tokens) == most).collect()
}

/// What steps spend on one kernel of one operator.
#[derive(Debug, Default, PartialEq)]
struct Row {
    launches: usize,
    total: Duration,
    least: Duration,
    most: Duration,
}

impl Row {
    fn add(&mut self, part: &Part) {
        let first = self.launches == 0;
        self.least = if first { part.time } else { self.least.min(part.time) };
        self.most = self.most.max(part.time);
        self.launches += 1;
        self.total += part.time;
    }
}

/// The table of steps of one kind.
struct Table {
    /// Largest share first.
    rows: Vec<((OpKind, &'static str), Row)>,
    steps: usize,
    /// The median of a step as served.
    served: Duration,
}

impl Table {
    fn new(served: &[&StepProfile], parts: &[&StepProfile]) -> Self {
        let mut rows: BTreeMap<(OpKind, &'static str), Row> = BTreeMap::new();
        for part in parts.iter().flat_map(|step| &step.profile.parts) {
            rows.entry((part.op, part.kernel)).or_default().add(part);
        }
        let mut rows: Vec<_> = rows.into_iter().collect();
        rows.sort_by_key(|(_, row)| std::cmp::Reverse(row.total));
        let mut times: Vec<Duration> = served.iter().map(|step| step.profile.whole).collect();
        times.sort();
        let served = times.get(times.len() / 2).copied().unwrap_or_default();
        Table { rows, steps: parts.len().max(1), served }
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let us = |time: Duration| time.as_secs_f64() * 1e6;
        let steps = self.steps as f64;
        let all: f64 = self.rows.iter().map(|(_, row)| us(row.total)).sum();
        let launches: usize = self.rows.iter().map(|(_, row)| row.launches).sum();
        writeln!(
            f,
            "| operator | kernel | launches | us a step | us each | least | most | share |\n\
             |---|---|---|---|---|---|---|---|"
        )?;
        for ((op, kernel), row) in &self.rows {
            let (count, total) = (row.launches as f64, us(row.total));
            writeln!(
                f,
                "| {op:?} | {kernel} | {} | {:.1} | {:.2} | {:.2} | {:.2} | {:.1} % |",
                count / steps,
                total / steps,
                total / count,
                us(row.least),
                us(row.most),
                100.0 * total / all.max(f64::MIN_POSITIVE)
            )?;
        }
        writeln!(
            f,
            "| all, one by one | | {} | {:.1} | | | | |",
            launches as f64 / steps,
            all / steps
        )?;
        write!(f, "| as served | | | {:.1} | | | | |", us(self.served))
    }
}

#[cfg(test)]
mod tests {
    use amphora_hal::Profile;

    use super::*;

    fn step(tokens: usize, sequences: usize, times: &[(OpKind, u64)]) -> StepProfile {
        let part =
            |&(op, us)| Part { op, layer: None, kernel: "plain", time: Duration::from_micros(us) };
        let parts: Vec<Part> = times.iter().map(part).collect();
        let whole = parts.iter().map(|part| part.time).sum();
        StepProfile { tokens, sequences, any_lora: false, profile: Profile { whole, parts } }
    }

    #[test]
    fn the_largest_step_of_a_kind_is_looked_at() {
        let steps = [step(100, 1, &[]), step(64, 1, &[]), step(2, 2, &[]), step(1, 1, &[])];
        let tokens = |decodes| -> Vec<usize> {
            largest(&steps, decodes).iter().map(|step| step.tokens).collect()
        };
        assert_eq!((tokens(false), tokens(true)), (vec![100], vec![2]));
    }

    #[test]
    fn rows_add_up_and_the_largest_is_first() {
        let steps = [
            step(2, 2, &[(OpKind::Linear, 10), (OpKind::FusedMoe, 30), (OpKind::Linear, 20)]),
            step(2, 2, &[(OpKind::Linear, 10), (OpKind::FusedMoe, 50), (OpKind::Linear, 20)]),
        ];
        let served = step(2, 2, &[(OpKind::Linear, 55)]);
        let table = Table::new(&[&served], &[&steps[0], &steps[1]]);
        let lines: Vec<String> = table.to_string().lines().map(str::to_owned).collect();
        assert_eq!(lines[2], "| FusedMoe | plain | 1 | 40.0 | 40.00 | 30.00 | 50.00 | 57.1 % |");
        assert_eq!(lines[3], "| Linear | plain | 2 | 30.0 | 15.00 | 10.00 | 20.00 | 42.9 % |");
        assert_eq!(lines[4], "| all, one by one | | 3 | 70.0 | | | | |");
        assert_eq!(lines[5..], ["| as served | | | 55.0 | | | | |"]);
    }
}
