//! The list of adapters, for readers outside the engine's thread.

use std::sync::Weak;

use super::{AdapterKey, Place};

/// One line of the list of adapters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdapterStatus {
    /// The version.
    pub key: AdapterKey,
    /// Where it is.
    pub place: Place,
    /// Whether it is out of the names and waits for its last user.
    pub draining: bool,
    /// Requests that were accepted for it and are not answered yet.
    pub requests: usize,
}

/// The same, to be kept: the number of requests stays that of the moment it is read.
#[derive(Debug, Clone)]
pub struct AdapterLine {
    pub(super) key: AdapterKey,
    pub(super) place: Place,
    pub(super) draining: bool,
    /// Counts the pins, one of our own included; nothing is left once the version is gone.
    pub(super) pins: Weak<()>,
}

impl AdapterLine {
    /// The name clients use.
    pub fn name(&self) -> &str {
        &self.key.name
    }

    /// Whether new requests find it.
    pub fn is_named(&self) -> bool {
        !self.draining
    }

    /// The line as it stands now.
    pub fn status(&self) -> AdapterStatus {
        AdapterStatus {
            key: self.key.clone(),
            place: self.place,
            draining: self.draining,
            requests: self.pins.strong_count().saturating_sub(1),
        }
    }
}
