//! Where the time of a stretch of a stream goes: what a device tells, and what it is told of what runs.

use std::time::Duration;

use crate::caps::OpKind;

/// What is being put on a stream; for profiles and for the vendor's profiler alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    /// A layer of the model, or `None`: what belongs to no layer.
    Layer(Option<usize>),
    /// An operator, whose launches follow.
    Begin(OpKind),
    /// The end of the operator.
    End,
}

/// How finely [`crate::Device::profile`] looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Detail {
    /// The stretch as it runs, from its beginning to its end.
    Whole,
    /// Each piece of it, one behind the other: what would overlap does not.
    Parts,
}

/// One piece of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// The operator it belongs to.
    pub op: OpKind,
    /// The layer it belongs to.
    pub layer: Option<usize>,
    /// The kernel as its source names it; of a device without kernels, how the operator runs.
    pub kernel: &'static str,
    /// From the end of the piece in front of it to its own.
    pub time: Duration,
}

/// Where the time went.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Profile {
    /// From the beginning of the stretch to its end.
    pub whole: Duration,
    /// Its pieces in order; none with [`Detail::Whole`].
    pub parts: Vec<Part>,
}
