//! Laws beside examples: what must hold between runs, whatever the numbers are.

mod adapters;
mod memory;
mod rows;

use amphora_hal::Backend;

use crate::compare::{Tolerance, Want, compare};
use crate::harness::{Case, Failure};
use crate::host::HostTensor;

pub use adapters::{Adapted, base_rows_of, each_adapter_alone};
pub use memory::{
    a_slot_takes_other_ranks_in_place, rows_without_numbers_stay_alone,
    used_workspace_does_not_show,
};

/// What a backend promises about a row computed in another batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowLaw {
    /// The same bits, whatever the batch.
    Bitwise,
    /// As near as two answers within the operator's tolerance lie; the order of a sum may depend on the
    /// bucket.
    Near,
}

/// All laws.
pub fn all<B: Backend>(row_law: RowLaw) -> Vec<Case<B>> {
    adapters::laws().into_iter().chain(rows::laws(row_law)).collect()
}

/// Whether a law was kept.
pub type Outcome = Result<(), Failure>;

fn wrong(what: impl Into<String>) -> Outcome {
    Err(Failure::Wrong(what.into()))
}

/// `got` is as `want`, within the tolerance; what neither run wrote holds the same bits in both.
fn near(what: &str, got: &HostTensor, want: &HostTensor, tolerance: Tolerance) -> Outcome {
    let numbers = want.values();
    let unwritten = |i: usize, value: f64| value.is_nan() && got.element(i) == want.element(i);
    let wants: Vec<Want> = numbers
        .into_iter()
        .enumerate()
        .map(|(i, value)| if unwritten(i, value) { Want::Any } else { Want::Near(value) })
        .collect();
    compare(want, got, &wants, tolerance).or_else(|text| wrong(format!("{what}: {text}")))
}

/// These rows of both tensors have the same bits.
fn same_rows(
    what: &str,
    got: &HostTensor,
    want: &HostTensor,
    rows: impl IntoIterator<Item = usize>,
) -> Outcome {
    match rows.into_iter().find(|&row| got.row(row) != want.row(row)) {
        Some(row) => wrong(format!("{what}: row {row} has other bits")),
        None => Ok(()),
    }
}
