//! The number of a step. Counts up from 1; 0 is "before the first".

/// One run of the model over a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Step(pub u64);

impl Step {
    /// The step after this one.
    pub fn next(self) -> Step {
        Step(self.0 + 1)
    }
}
