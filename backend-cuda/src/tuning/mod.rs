//! Tuning as data: which kernel of several runs an operator at a shape, and with which sizes.
//!
//! Without data the pure heuristic chooses (`heuristics`). Data is files of one GPU and one
//! operator each (`file`), whose entries say for which calls ([`When`]) they are and what to do there
//! ([`operators`]). Those of a folder go before those that are built in for the GPU, and an entry that
//! does not fit a call, because its kernel does not take it, is passed over for the next nearest.
//!
//! Data changes launches and with them the order of sums, never what is computed: every choice keeps the
//! operator's laws, and repeats bit for bit unless it says `atomic`. Files are checked whole when the
//! device is opened; what no kernel obeys is an error with file and field.

pub mod file;
pub mod operators;
pub mod vllm;

mod load;
mod when;

pub use crate::driver::Limits;
pub use file::{AnyFile, Entry, File, Made, Measured};
pub use load::{Loaded, file_name};
pub use operators::{AttentionUse, DeltaUse, DenseUse, ExpertsUse, Operator, RouteUse, ShrinkUse};
pub use when::{Element, When};

/// What is wrong with a file: where, and what was expected there.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {what}")]
pub struct Fault {
    /// The field, with the numbers of entries in front: `entries[3].use.parts`.
    pub field: String,
    /// What is wrong with it.
    pub what: String,
}

impl Fault {
    fn new(field: impl Into<String>, what: impl Into<String>) -> Self {
        Fault { field: field.into(), what: what.into() }
    }

    /// The same fault, seen from outside `front`.
    fn within(self, front: &str) -> Self {
        Fault { field: format!("{front}.{}", self.field), what: self.what }
    }
}

/// Choices of one operator, those that go first in front.
#[derive(Debug, Clone)]
pub struct Choices<U> {
    layers: Vec<Vec<Entry<U>>>,
}

impl<U> Default for Choices<U> {
    fn default() -> Self {
        Choices { layers: Vec::new() }
    }
}

impl<U> Choices<U> {
    /// What the nearest entry that fits the call makes of it; `None`: there is none, or it leaves the
    /// call to the heuristic. Layer by layer, entries are asked in the order of [`When::nearness`].
    pub fn find<T>(&self, call: &When, fits: impl Fn(&U) -> Option<T>) -> Option<T> {
        for layer in &self.layers {
            let near = |entry: &Entry<U>| entry.when.nearness(call);
            let mut order: Vec<_> =
                layer.iter().filter_map(|entry| Some((near(entry)?, &entry.choice))).collect();
            order.sort_by_key(|(nearness, _)| *nearness);
            for (_, choice) in order {
                match choice.as_ref().map(&fits) {
                    None => return None,
                    Some(None) => {}
                    Some(fitting) => return fitting,
                }
            }
        }
        None
    }

    /// Every choice, and the calls that it is for.
    pub(crate) fn each(&self) -> impl Iterator<Item = (&When, &U)> {
        self.layers.iter().flatten().filter_map(|entry| Some((&entry.when, entry.choice.as_ref()?)))
    }

    /// Whether any entry satisfies `is`.
    pub(crate) fn any(&self, is: impl Fn(&U) -> bool) -> bool {
        self.layers.iter().flatten().filter_map(|entry| entry.choice.as_ref()).any(is)
    }

    fn put(&mut self, entries: Vec<Entry<U>>, at: Rank) {
        let at = match at {
            Rank::First => 0,
            Rank::Last => self.layers.len(),
        };
        if !entries.is_empty() {
            self.layers.insert(at, entries);
        }
    }
}

/// Where entries go among those that are there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rank {
    First,
    Last,
}

/// All choices of a device.
#[derive(Debug, Clone, Default)]
pub struct Tuning {
    /// `linear`, and the base product of `lora_linear`.
    pub linear: Choices<DenseUse>,
    /// The deltas of `lora_linear`.
    pub lora_linear: Choices<DeltaUse>,
    /// The first half of deltas of every type and shape.
    pub lora_shrink: Choices<ShrinkUse>,
    /// `moe_route`.
    pub moe_route: Choices<RouteUse>,
    /// `fused_moe` and `fused_moe_lora`, which must agree: rows without an adapter have one result.
    pub fused_moe: Choices<ExpertsUse>,
    /// `paged_attention`.
    pub paged_attention: Choices<AttentionUse>,
}

impl Tuning {
    /// Puts a file's entries in front of all others of its operator.
    pub fn put_first(&mut self, file: AnyFile) {
        self.put(file, Rank::First);
    }

    /// Puts a file's entries behind all others of its operator.
    pub fn put_last(&mut self, file: AnyFile) {
        self.put(file, Rank::Last);
    }

    fn put(&mut self, file: AnyFile, at: Rank) {
        match file {
            AnyFile::Linear(file) => self.linear.put(file.entries, at),
            AnyFile::LoraLinear(file) => self.lora_linear.put(file.entries, at),
            AnyFile::LoraShrink(file) => self.lora_shrink.put(file.entries, at),
            AnyFile::MoeRoute(file) => self.moe_route.put(file.entries, at),
            AnyFile::FusedMoe(file) => self.fused_moe.put(file.entries, at),
            AnyFile::PagedAttention(file) => self.paged_attention.put(file.entries, at),
        }
    }
}
