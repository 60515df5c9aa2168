//! `score --compare A B`: how two files of scores differ, and whether that is within the rule.
//!
//! f32: every logit and greedy log-probability within the tolerance, and the same greedy ids.
//!
//! bf16: greedy text cannot be compared, and single positions may be far off where a router decides
//! nearly equal. So only prompts of at least [`BF16_POSITIONS`] positions are judged: the median
//! over positions of KL(A, B) of each id is within the tolerance, and over all of them the best
//! token is the same at [`BF16_ARGMAX`] of the positions.

use std::fmt::Write as _;

use thiserror::Error;

use super::file::{Scored, Scores};

/// Largest difference of a logit in f32.
pub const F32_TOLERANCE: f64 = 2e-3;
/// Largest median KL divergence in bf16.
pub const BF16_TOLERANCE: f64 = 0.01;
/// Share of positions at which the best token must agree in bf16.
pub const BF16_ARGMAX: f64 = 0.85;
/// Prompts below this many positions are not judged in bf16.
pub const BF16_POSITIONS: usize = 7;

/// Which rule holds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rule {
    F32 { tolerance: f64 },
    Bf16 { tolerance: f64 },
}

/// Files that cannot be compared at all.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum CompareError {
    #[error("id '{id}' is in {there} and not in {missing}")]
    Missing { id: String, there: &'static str, missing: &'static str },
    #[error("id '{id}': {what} is {first} in the first file and {second} in the second")]
    Shape { id: String, what: &'static str, first: String, second: String },
    #[error("no prompt has {BF16_POSITIONS} positions or more: the bf16 rule has nothing to judge")]
    NothingToJudge,
}

/// The outcome: lines to print, and whether the rule holds.
#[derive(Debug)]
pub struct Comparison {
    pub report: String,
    pub within: bool,
}

/// The differences of one id.
struct Difference {
    logit: f64,
    logprob: f64,
    /// The first place where the greedy ids part.
    parting: Option<usize>,
    median_kl: f64,
    positions: usize,
    same_best: usize,
}

/// Compares `second` with the reference `first`.
pub fn compare(first: &Scores, second: &Scores, rule: Rule) -> Result<Comparison, CompareError> {
    let missing =
        |id: &String, there, missing| CompareError::Missing { id: id.clone(), there, missing };
    if let Some(id) = second.keys().find(|id| !first.contains_key(*id)) {
        return Err(missing(id, "the second file", "the first"));
    }
    let mut report = String::new();
    let mut within = true;
    let (mut judged, mut agreed) = (0, 0);
    for (id, a) in first {
        let b = second.get(id).ok_or_else(|| missing(id, "the first file", "the second"))?;
        check_shapes(id, a, b)?;
        let difference = Difference::of(a, b);
        let good = match rule {
            Rule::F32 { tolerance } => difference.is_within_f32(tolerance),
            Rule::Bf16 { .. } if difference.positions < BF16_POSITIONS => true,
            Rule::Bf16 { tolerance } => {
                judged += difference.positions;
                agreed += difference.same_best;
                difference.median_kl <= tolerance
            }
        };
        within &= good;
        // Writing to a String cannot fail.
        let _ = writeln!(report, "{id}: {}{}", difference.line(), if good { "" } else { "  FAIL" });
    }
    let summary = match rule {
        Rule::F32 { tolerance } => format!("f32, tolerance {tolerance:e} and equal greedy ids"),
        Rule::Bf16 { .. } if judged == 0 => return Err(CompareError::NothingToJudge),
        Rule::Bf16 { tolerance } => {
            let share = agreed as f64 / judged as f64;
            within &= share >= BF16_ARGMAX;
            format!(
                "bf16, median KL at most {tolerance} for each id of {BF16_POSITIONS} positions or \
                 more, best token equal at {:.1} % of their positions (at least {:.0} %)",
                share * 100.0,
                BF16_ARGMAX * 100.0
            )
        }
    };
    let verdict = if within { "within" } else { "NOT within" };
    let _ = writeln!(report, "{} ids, {verdict} the rule: {summary}", first.len());
    Ok(Comparison { report, within })
}

fn check_shapes(id: &str, a: &Scored, b: &Scored) -> Result<(), CompareError> {
    let refuse = |what, first: String, second: String| {
        Err(CompareError::Shape { id: id.to_owned(), what, first, second })
    };
    let shape = |scored: &Scored| format!("[{}, {}]", scored.positions(), scored.vocab);
    if (a.positions(), a.vocab) != (b.positions(), b.vocab) {
        return refuse("the shape of logits", shape(a), shape(b));
    }
    let (first, second) = (a.greedy_ids.len(), b.greedy_ids.len());
    if first != second {
        return refuse("the number of greedy ids", first.to_string(), second.to_string());
    }
    Ok(())
}

impl Difference {
    fn of(a: &Scored, b: &Scored) -> Self {
        let parting = a.greedy_ids.iter().zip(&b.greedy_ids).position(|(x, y)| x != y);
        // After the ids part, log-probabilities are those of other texts.
        let common = parting.unwrap_or(a.greedy_ids.len());
        let mut divergences: Vec<f64> = a.rows().zip(b.rows()).map(|(x, y)| kl(x, y)).collect();
        divergences.sort_by(f64::total_cmp);
        Self {
            logit: largest(&a.logits, &b.logits),
            logprob: largest(&a.greedy_logprobs[..common], &b.greedy_logprobs[..common]),
            parting,
            median_kl: median(&divergences),
            positions: a.positions(),
            same_best: a.rows().zip(b.rows()).filter(|(x, y)| best(x) == best(y)).count(),
        }
    }

    fn is_within_f32(&self, tolerance: f64) -> bool {
        self.parting.is_none() && self.logit <= tolerance && self.logprob <= tolerance
    }

    fn line(&self) -> String {
        let greedy = match self.parting {
            None => "greedy ids equal".to_owned(),
            Some(at) => format!("greedy ids part at {at}"),
        };
        format!(
            "max |dlogit| {:.2e}, {greedy}, max |dlogprob| {:.2e}, median KL {:.2e}, best token \
             equal at {}/{}",
            self.logit, self.logprob, self.median_kl, self.same_best, self.positions
        )
    }
}

/// The largest difference; infinite where either has a NaN or unequal infinities.
fn largest(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).fold(0.0, |most, (&x, &y)| {
        let difference = if x == y { 0.0 } else { (f64::from(x) - f64::from(y)).abs() };
        if difference.is_nan() { f64::INFINITY } else { most.max(difference) }
    })
}

fn median(sorted: &[f64]) -> f64 {
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
    }
}

/// KL(softmax(a), softmax(b)); infinite where it is not a number.
fn kl(a: &[f32], b: &[f32]) -> f64 {
    let (norm_a, norm_b) = (log_sum_exp(a), log_sum_exp(b));
    let sum: f64 = a
        .iter()
        .zip(b)
        .map(|(&x, &y)| {
            let p = f64::from(x) - norm_a;
            let q = f64::from(y) - norm_b;
            p.exp() * (p - q)
        })
        .sum();
    if sum.is_nan() { f64::INFINITY } else { sum.max(0.0) }
}

fn log_sum_exp(row: &[f32]) -> f64 {
    let most = row.iter().fold(f32::NEG_INFINITY, |most, &x| most.max(x));
    let sum: f64 = row.iter().map(|&x| (f64::from(x) - f64::from(most)).exp()).sum();
    f64::from(most) + sum.ln()
}

/// The first of the largest, as greedy decoding takes it.
fn best(row: &[f32]) -> usize {
    let mut best = 0;
    for (i, x) in row.iter().enumerate() {
        if *x > row[best] {
            best = i;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    const F32: Rule = Rule::F32 { tolerance: F32_TOLERANCE };
    const BF16: Rule = Rule::Bf16 { tolerance: BF16_TOLERANCE };

    fn scored(positions: usize) -> Scored {
        Scored {
            logits: (0..positions * 5).map(|i| ((i * 7) % 11) as f32).collect(),
            vocab: 5,
            greedy_ids: vec![3, 1],
            greedy_logprobs: vec![-0.5, -1.5],
        }
    }

    fn one(scored: Scored) -> Scores {
        [("p0".to_owned(), scored)].into()
    }

    fn judge(first: Scored, second: Scored, rule: Rule) -> bool {
        compare(&one(first), &one(second), rule).expect("comparable").within
    }

    #[test]
    fn equal_files_are_within_both_rules() {
        assert!(judge(scored(8), scored(8), F32));
        assert!(judge(scored(8), scored(8), BF16));
    }

    #[test]
    fn f32_takes_logits_to_the_tolerance() {
        let mut other = scored(8);
        other.logits[17] += 1e-3;
        assert!(judge(scored(8), other.clone(), F32));
        other.logits[17] += 2e-3;
        assert!(!judge(scored(8), other.clone(), F32));
        assert!(judge(scored(8), other, Rule::F32 { tolerance: 1e-2 }));
    }

    #[test]
    fn f32_wants_the_same_greedy_ids() {
        let mut other = scored(8);
        other.greedy_ids[1] = 2;
        let comparison = compare(&one(scored(8)), &one(other.clone()), F32).expect("comparable");
        assert!(!comparison.within);
        assert!(comparison.report.contains("part at 1") && comparison.report.contains("FAIL"));
        assert!(judge(scored(8), other, BF16));
    }

    #[test]
    fn nan_is_never_within() {
        let mut other = scored(8);
        other.logits[3] = f32::NAN;
        assert!(!judge(scored(8), other, F32));
        let mut other = scored(8);
        other.logits.fill(f32::NAN);
        assert!(!judge(scored(8), other.clone(), BF16));
        assert!(!judge(other.clone(), other, F32));
    }

    #[test]
    fn bf16_judges_the_median_and_the_best_token() {
        let mut one_off = scored(8);
        one_off.logits[..5].fill(0.0);
        assert!(judge(scored(8), one_off, BF16));
        let mut all_off = scored(8);
        all_off.logits.iter_mut().for_each(|x| *x *= 0.5);
        assert!(!judge(scored(8), all_off, BF16));
        let mut flipped = scored(8);
        for row in flipped.logits.chunks_mut(5).take(2) {
            row.reverse();
        }
        assert!(!judge(scored(8), flipped, BF16));
    }

    #[test]
    fn bf16_does_not_pass_for_want_of_positions() {
        let short = compare(&one(scored(6)), &one(scored(6)), BF16);
        assert_eq!(short.err(), Some(CompareError::NothingToJudge));
    }

    #[test]
    fn missing_ids_and_other_shapes_are_named() {
        let two: Scores = [("p0".to_owned(), scored(8)), ("p1".to_owned(), scored(8))].into();
        for (a, b) in [(&two, &one(scored(8))), (&one(scored(8)), &two)] {
            let error = compare(a, b, F32).expect_err("p1 is missing");
            assert!(error.to_string().contains("'p1'"), "{error}");
        }
        let error = compare(&one(scored(8)), &one(scored(7)), F32).expect_err("other shape");
        assert!(error.to_string().contains("[8, 5]") && error.to_string().contains("[7, 5]"));
        let mut longer = scored(8);
        longer.greedy_ids.push(1);
        longer.greedy_logprobs.push(0.0);
        assert!(compare(&one(scored(8)), &one(longer), F32).is_err());
    }
}
