//! All reasons why an adapter is refused, in bounded room: of reasons that say the same of many tensors,
//! the first, the number and some examples are kept.

use super::reason::{Quoted, Reason};

/// A refused adapter.
#[derive(Debug, thiserror::Error)]
#[error("adapter {adapter} is refused: {}", Listed(.reasons, *.further))]
pub struct AdapterRefused {
    /// The folder.
    pub adapter: String,
    /// Every reason found, at least one.
    pub reasons: Vec<Refusal>,
    /// How many more there are, of further kinds, beyond what is kept; 0 except for files made of
    /// nonsense.
    pub further: usize,
}

/// One reason, for all tensors of which it is true.
#[derive(Debug, thiserror::Error)]
#[error("{reason}{}", More(*.count, .others))]
pub struct Refusal {
    /// The first.
    pub reason: Reason,
    /// How many there are of it.
    pub count: usize,
    /// What the next few are about.
    pub others: Vec<String>,
}

/// Kinds of reasons kept.
const MOST_KINDS: usize = 48;
/// Subjects kept beside the first.
const MOST_OTHERS: usize = 3;

/// Reasons while they are collected.
#[derive(Debug, Default)]
pub(super) struct Reasons {
    kinds: Vec<Refusal>,
    further: usize,
}

impl Reasons {
    pub(super) fn push(&mut self, reason: impl Into<Reason>) {
        let reason = reason.into();
        if let Some(known) = self.kinds.iter_mut().find(|known| known.reason.is_like(&reason)) {
            known.count += 1;
            if let (true, Some(subject)) = (known.others.len() < MOST_OTHERS, reason.subject()) {
                known.others.push(subject.to_owned());
            }
        } else if self.kinds.len() < MOST_KINDS {
            self.kinds.push(Refusal { reason, count: 1, others: Vec::new() });
        } else {
            self.further += 1;
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.kinds.is_empty()
    }

    /// The refusal of `adapter`.
    pub(super) fn refuse(self, adapter: String) -> AdapterRefused {
        AdapterRefused { adapter, reasons: self.kinds, further: self.further }
    }
}

struct Listed<'a>(&'a [Refusal], usize);

impl std::fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (i, refusal) in self.0.iter().enumerate() {
            write!(f, "{}{refusal}", if i > 0 { "; " } else { "" })?;
        }
        match self.1 {
            0 => Ok(()),
            further => write!(f, "; and {further} more"),
        }
    }
}

/// The rest of a reason's tensors: how many there are in all, and the names of some.
struct More<'a>(usize, &'a [String]);

impl std::fmt::Display for More<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Some(more) = self.0.checked_sub(1).filter(|&more| more > 0) else {
            return Ok(());
        };
        write!(f, " (and {more} more like it")?;
        if !self.1.is_empty() {
            write!(f, ": {}", Quoted(self.1))?;
        }
        if self.1.len() < more { f.write_str(", …)") } else { f.write_str(")") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thousand_like_reasons_are_one_with_a_count() {
        let mut reasons = Reasons::default();
        for i in 0..1000 {
            reasons.push(Reason::NotTargeted { tensor: format!("t{i}") });
        }
        reasons.push(Reason::NoTensors);
        let refused = reasons.refuse("x".to_owned());
        assert_eq!(refused.reasons.len(), 2);
        assert_eq!((refused.reasons[0].count, refused.further), (1000, 0));
        let text = refused.to_string();
        assert!(text.contains("(and 999 more like it: `t1`, `t2`, `t3`, …); "), "{text}");
    }

    #[test]
    fn kinds_are_bounded_too() {
        let mut reasons = Reasons::default();
        for found in 0..1000 {
            reasons.push(Reason::DType { tensor: "t".to_owned(), found: found.to_string() });
        }
        let refused = reasons.refuse("x".to_owned());
        assert_eq!(refused.reasons.len() + refused.further, 1000);
        assert!(refused.to_string().len() < 10_000);
    }
}
