//! `--contexts`: the time to the first token at prompts of many lengths, with an adapter and without, by groups of
//! like lengths, and whether anything was compiled or loaded for one of them.

use amphora_engine::EngineHandle;
use amphora_hal::{Counters, Device};

use super::round::{self, Load, Tenants, Times};
use crate::console::Voice;

/// Times that each is asked, the two in turn; the best counts, as others may use the machine, and as a GPU's clock
/// falls where its power is limited (an H200's by a seventh and more), now for the one and now for the other.
const TRIES: usize = 8;

/// How much later the first token may come with an adapter.
const GATE: f64 = 1.15;

/// Groups of like lengths that are told apart.
const GROUPS: usize = 16;

/// What is asked.
pub struct Contexts<'a> {
    /// How many lengths.
    pub count: usize,
    /// A request; its prompt is the longest.
    pub load: Load<'a>,
    /// Adapters, asked in turn.
    pub names: &'a [String],
    /// What the device had done when the engine was ready.
    pub ready: Counters,
}

/// Times to the first token at one length, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Pair {
    tokens: usize,
    base: f64,
    adapter: f64,
}

impl Pair {
    fn ratio(self) -> f64 {
        if self.base > 0.0 { self.adapter / self.base } else { 1.0 }
    }
}

impl Contexts<'_> {
    /// Asks, and prints a line for all lengths together.
    pub fn run<D: Device>(&self, engine: &EngineHandle, device: &D) -> anyhow::Result<()> {
        let mut pairs = Vec::new();
        for i in 0..self.count {
            // Weyl's sequence of the golden ratio: lengths that lie evenly at any count.
            let place = (i as f64 * 0.618_033_988_75).fract();
            let tokens = 1 + (place * self.load.prompt as f64) as usize;
            let Some(name) = self.names.get(i % self.names.len().max(1)) else { break };
            let name = std::slice::from_ref(name);
            let mut best = [f64::INFINITY; 2];
            for _ in 0..TRIES {
                for (tenants, best) in
                    [Tenants::Base, Tenants::Mixed(name)].into_iter().zip(&mut best)
                {
                    let load = Load { streams: 1, prompt: tokens, answer: 1, tenants, ..self.load };
                    *best = best.min(round::run(engine, &load)?.first.at(0.5));
                }
            }
            let [base, adapter] = best;
            pairs.push(Pair { tokens, base, adapter });
        }
        engine.settle();
        let made = device.counters().since(&self.ready);
        Voice::Out.line(format_args!(
            "{}; since ready {} compilations, {} modules loaded, {} allocations",
            summary(&pairs),
            made.compilations,
            made.modules,
            made.allocations
        ))?;
        for line in by_length(&mut pairs) {
            Voice::Out.line(format_args!("{line}"))?;
        }
        Ok(())
    }
}

/// The median of what `of` tells of each.
fn median(pairs: &[Pair], of: fn(&Pair) -> f64) -> f64 {
    Times::new(pairs.iter().map(of).collect()).at(0.5)
}

/// One line of all lengths.
fn summary(pairs: &[Pair]) -> String {
    let within = pairs.iter().filter(|pair| pair.ratio() <= GATE).count();
    let Some(worst) = pairs.iter().max_by(|a, b| a.ratio().total_cmp(&b.ratio())) else {
        return "no contexts".to_owned();
    };
    format!(
        "first token with an adapter over without, {} contexts: median {:.3}, most {:.3} ({} tokens: {:.2} \
         over {:.2} ms), within {GATE} at {within}",
        pairs.len(),
        median(pairs, |pair| pair.ratio()),
        worst.ratio(),
        worst.tokens,
        worst.adapter,
        worst.base
    )
}

/// A table of groups of like lengths, shortest first: where the ratio is high tells which kernels to look at,
/// as they are chosen by the number of tokens. Sorts `pairs` by tokens.
fn by_length(pairs: &mut [Pair]) -> Vec<String> {
    pairs.sort_by_key(|pair| pair.tokens);
    let group = |group: &[Pair]| {
        let most = group.iter().map(|pair| pair.ratio()).fold(0.0, f64::max);
        let over = group.iter().filter(|pair| pair.ratio() > GATE).count();
        format!(
            "| {} to {} | {:.2} | {:.2} | {:.3} | {most:.3} | {over} of {} |",
            group[0].tokens,
            group[group.len() - 1].tokens,
            median(group, |pair| pair.base),
            median(group, |pair| pair.adapter),
            median(group, |pair| pair.ratio()),
            group.len()
        )
    };
    let mut lines = vec![
        format!("| tokens | base ms | with an adapter | ratio | most | above {GATE} |"),
        "|---|---|---|---|---|---|".to_owned(),
    ];
    lines.extend(pairs.chunks(pairs.len().div_ceil(GROUPS).max(1)).map(group));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_is_told_and_those_within_are_counted() {
        let pair = |tokens, adapter| Pair { tokens, base: 10.0, adapter };
        let text = summary(&[pair(7, 13.0), pair(8, 11.0), pair(9, 10.5)]);
        let expected = "first token with an adapter over without, 3 contexts: median 1.100, most 1.300 (7 \
                        tokens: 13.00 over 10.00 ms), within 1.15 at 2";
        assert_eq!(text, expected);
        assert_eq!(summary(&[]), "no contexts");
    }

    #[test]
    fn lengths_are_told_in_groups_from_the_shortest() {
        let pair = |tokens, adapter| Pair { tokens, base: 10.0, adapter };
        let mut pairs: Vec<_> = (1..=32).rev().map(|n| pair(n, 10.0 + n as f64 / 10.0)).collect();
        let lines = by_length(&mut pairs);
        assert_eq!(lines.len(), 2 + GROUPS);
        assert_eq!(lines[2], "| 1 to 2 | 10.00 | 10.10 | 1.010 | 1.020 | 0 of 2 |");
        assert_eq!(lines[9], "| 15 to 16 | 10.00 | 11.50 | 1.150 | 1.160 | 1 of 2 |");
        assert_eq!(by_length(&mut [pair(7, 13.0)]).len(), 3);
        assert_eq!(by_length(&mut []).len(), 2);
    }
}
