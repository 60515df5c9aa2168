//! What benchmarks of a layer on a device share: whose adapters rows have, gates and their verdicts, which
//! cases are wanted, and the reference in f64 of what is made of the pattern.

use std::process::ExitCode;

use amphora_engine::measure::{Pattern, RANK, SCALE, in_turn};
use amphora_hal::Result;

/// Bytes that the H200 reads in a microsecond.
pub const ROOF: f64 = 4.64e6;
/// Rounding activations and a result leaves about 2e-3; a delta is tens of times as much.
pub const MOST_ERROR: f64 = 5e-3;

/// Whose adapters a step's rows have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Users {
    /// Every adapter in turn, row by row, as streams of one token have it.
    Mixed,
    /// Every adapter in turn, each for a stretch of rows, as prompts have it.
    Stretches,
    /// All of one.
    Single,
    /// A fifth of the rows with none.
    SomeNone,
}

impl Users {
    /// The adapter of each of `rows` rows.
    pub fn slots(self, rows: usize, slots: usize) -> Vec<Option<usize>> {
        let mut of_rows = in_turn(rows, slots);
        match self {
            Users::Mixed => {}
            Users::Stretches => {
                let of = |row| row * slots / rows.max(1);
                of_rows.iter_mut().enumerate().for_each(|(row, slot)| *slot = Some(of(row)));
            }
            Users::Single => of_rows.fill(Some(slots / 2)),
            Users::SomeNone => of_rows.iter_mut().skip(4).step_by(5).for_each(|slot| *slot = None),
        }
        of_rows
    }
}

/// A gate's verdict; 0 is none.
pub fn verdict(value: f64, gate: f64) -> String {
    match gate {
        0.0 => "-".to_owned(),
        _ if value <= gate => format!("{gate:.1} ok"),
        _ => format!("{gate:.1} MISS"),
    }
}

/// The cases that are wanted: those whose name holds one of the texts, or all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wanted(pub Vec<String>);

impl Wanted {
    /// Whether a case is.
    pub fn has(&self, name: &str) -> bool {
        self.0.is_empty() || self.0.iter().any(|text| name.contains(text.as_str()))
    }
}

/// How a benchmark ends that found everything right, or did not, or failed.
pub fn ended(right: Result<bool>) -> ExitCode {
    match right {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// A tensor that is stretches of the pattern, in f64.
#[derive(Debug, Clone, Copy)]
pub struct Stretches<'a> {
    /// The pattern.
    pub pattern: &'a Pattern,
    /// The tensor's.
    pub seed: u64,
}

impl Stretches<'_> {
    /// `len` elements from `first` on.
    pub fn row(self, first: usize, len: usize) -> impl Iterator<Item = f64> {
        (0..len).map(move |i| self.pattern.value(self.seed, first + i))
    }

    /// The elements from `first` on times x.
    pub fn dot(self, first: usize, x: &[f64]) -> f64 {
        self.row(first, x.len()).zip(x).map(|(w, x)| w * x).sum()
    }

    /// Of an arena: scale · A · x of the block A at byte `at`.
    pub fn shrink(self, at: usize, x: &[f64]) -> Vec<f64> {
        (0..RANK).map(|r| f64::from(SCALE) * self.dot(at / 2 + r * x.len(), x)).collect()
    }

    /// Of an arena: element `element` of B · shrunk, of the block B at byte `at`.
    pub fn expand(self, at: usize, element: usize, shrunk: &[f64]) -> f64 {
        self.dot(at / 2 + element * RANK, shrunk)
    }
}

/// What outputs differ by from what they should be.
#[derive(Debug, Clone, Copy, Default)]
pub struct Error {
    errors: f64,
    squares: f64,
}

impl Error {
    /// One more output.
    pub fn add(&mut self, out: f64, want: f64) {
        self.errors += (out - want).powi(2);
        self.squares += want * want;
    }

    /// The root of the mean square error over that of what should be.
    pub fn relative(self) -> f64 {
        (self.errors / self.squares).sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_is_met_by_at_most_its_value() {
        assert_eq!(
            [verdict(3.0, 3.0), verdict(3.1, 3.0), verdict(9.0, 0.0)],
            ["3.0 ok", "3.0 MISS", "-"]
        );
    }

    #[test]
    fn a_fifth_of_some_rows_has_no_adapter() {
        let slots = Users::SomeNone.slots(10, 8);
        assert_eq!(slots.iter().filter(|slot| slot.is_none()).count(), 2);
        assert_eq!((slots[3], slots[4], slots[8]), (Some(3), None, Some(0)));
        assert_eq!(Users::Single.slots(2, 8), [Some(4); 2]);
        assert_eq!(Users::Stretches.slots(5, 2), [0, 0, 0, 1, 1].map(Some));
    }

    #[test]
    fn an_output_that_is_no_number_is_an_error() {
        let mut error = Error::default();
        error.add(1.0, 1.0);
        assert_eq!(error.relative(), 0.0);
        error.add(f64::NAN, 1.0);
        assert!(error.relative().is_nan());
    }
}
