//! Which adapter version is where. Pure state and rules; `pool` moves the bytes.
//!
//! ```text
//!   Absent ── stage ──▶ Staged ── begin_load ──▶ Loading ── finish_load ──▶ Hot
//!                       │ ▲ ▲                                                │
//!                  cool │ │ └───────────── evict (nobody uses it) ───────────┘
//!                       ▼ │ warm
//!                       Cold: its image is given up, its files are read again
//!   retire (unload, or a newer version): out of the names at once; `sweep` ends it when nobody holds it
//! ```
//!
//! A request holds a [`Pin`] from the moment it is accepted, so that its version lives until it is
//! answered, and a [`Hold`] while it runs, so that its slot stays. Both are counted by ownership:
//! dropping one gives the reference back, exactly once, on every way out.

mod list;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::sync::Arc;

use amphora_hal::Slot;

pub use list::{AdapterLine, AdapterStatus};

use crate::step::Step;

/// One version of an adapter. Replacing an adapter under its name makes another key.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AdapterKey {
    /// The name clients use.
    pub name: Arc<str>,
    /// Counts up over all names, so no two versions ever share a key.
    pub version: u64,
}

impl fmt::Display for AdapterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.name, self.version)
    }
}

/// Why the ledger refuses.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LedgerError {
    /// No adapter of that name, or the version is gone.
    #[error("there is no adapter `{0}`")]
    Unknown(String),
    /// A request or a step still uses the adapter.
    #[error("adapter `{0}` is in use")]
    InUse(String),
    /// Every slot has an adapter.
    #[error("all {0} adapter slots are taken")]
    NoSlot(usize),
    /// The move is not one of the diagram.
    #[error("adapter `{key}` cannot {action} while it is {state}")]
    State {
        /// The version.
        key: String,
        /// What was asked.
        action: &'static str,
        /// Where it is.
        state: &'static str,
    },
}

/// Keeps a version alive for a request that was accepted.
#[derive(Debug, Clone)]
pub struct Pin {
    /// The version.
    pub key: AdapterKey,
    _count: Arc<()>,
}

/// Keeps a version in its slot for a request that runs.
#[derive(Debug)]
pub struct Hold {
    /// Where the adapter is.
    pub slot: Slot,
    _count: Arc<()>,
}

/// The ledger's answer to the scheduler's one question.
#[derive(Debug)]
pub enum Residency {
    /// On the device; keep the hold while running.
    Hot(Hold),
    /// On its way, or waiting for room.
    Coming,
    /// Not to be had: there is no such version.
    Absent,
}

/// Where one version is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// In its files alone.
    Cold,
    /// In host memory.
    Staged,
    /// A slot is taken, its bytes are under way.
    Loading(Slot),
    /// Usable in this slot.
    Hot(Slot),
}

impl Place {
    fn name(self) -> &'static str {
        match self {
            Place::Cold => "cold",
            Place::Staged => "staged",
            Place::Loading(_) => "loading",
            Place::Hot(_) => "hot",
        }
    }
}

#[derive(Debug)]
struct Version {
    place: Place,
    /// One strong count each for every pin and hold, and one of our own.
    pins: Arc<()>,
    holds: Arc<()>,
    /// The last step that reads its blocks.
    last_step: Step,
}

impl Version {
    fn pins(&self) -> usize {
        Arc::strong_count(&self.pins) - 1
    }

    fn holds(&self) -> usize {
        Arc::strong_count(&self.holds) - 1
    }

    /// Whether neither a request nor a step that may still run reads its blocks.
    fn idle(&self, completed: Step) -> bool {
        self.holds() == 0 && self.last_step <= completed
    }
}

/// All versions and slots.
#[derive(Debug)]
pub struct Ledger {
    names: HashMap<Arc<str>, AdapterKey>,
    versions: BTreeMap<AdapterKey, Version>,
    /// Versions that are out of the names.
    retired: BTreeSet<AdapterKey>,
    slots: Vec<Option<AdapterKey>>,
    next_version: u64,
    /// Counts the changes of the list, so that nobody makes it anew without one.
    revision: u64,
}

impl Ledger {
    /// A ledger of `slots` empty slots.
    pub fn new(slots: usize) -> Self {
        Ledger {
            names: HashMap::new(),
            versions: BTreeMap::new(),
            retired: BTreeSet::new(),
            slots: vec![None; slots],
            next_version: 1,
            revision: 0,
        }
    }

    /// Enters a version whose image is in host memory. An older version under the name is retired.
    pub fn stage(&mut self, name: &str) -> AdapterKey {
        let name: Arc<str> = name.into();
        let key = AdapterKey { name: name.clone(), version: self.next_version };
        self.next_version += 1;
        self.revision += 1;
        self.retired.extend(self.names.insert(name, key.clone()));
        let version = Version {
            place: Place::Staged,
            pins: Arc::new(()),
            holds: Arc::new(()),
            last_step: Step::default(),
        };
        self.versions.insert(key.clone(), version);
        key
    }

    /// Takes the current version out of the names: no new request finds it. Its memory is freed by
    /// `sweep` when the last request that has it is answered.
    pub fn retire(&mut self, name: &str) -> Result<AdapterKey, LedgerError> {
        let key = self.names.remove(name).ok_or_else(|| LedgerError::Unknown(name.into()))?;
        self.revision += 1;
        self.retired.insert(key.clone());
        Ok(key)
    }

    /// Pins the version that a new request is to use.
    pub fn pin(&self, name: &str) -> Result<Pin, LedgerError> {
        let unknown = || LedgerError::Unknown(name.into());
        let key = self.names.get(name).ok_or_else(unknown)?;
        let version = self.versions.get(key).ok_or_else(unknown)?;
        Ok(Pin { key: key.clone(), _count: version.pins.clone() })
    }

    /// Where `key` is, with a hold on its slot if it has one.
    pub fn residency(&self, key: &AdapterKey) -> Residency {
        match self.versions.get(key) {
            None => Residency::Absent,
            Some(version) => match version.place {
                Place::Hot(slot) => Residency::Hot(Hold { slot, _count: version.holds.clone() }),
                Place::Cold | Place::Staged | Place::Loading(_) => Residency::Coming,
            },
        }
    }

    /// Whether a slot is free.
    pub fn has_free_slot(&self) -> bool {
        self.slots.iter().any(Option::is_none)
    }

    /// Where `key` is.
    pub fn place(&self, key: &AdapterKey) -> Option<Place> {
        self.versions.get(key).map(|version| version.place)
    }

    /// Takes a free slot for a staged version.
    pub fn begin_load(&mut self, key: &AdapterKey) -> Result<Slot, LedgerError> {
        let index = self.slots.iter().position(Option::is_none);
        let slots = self.slots.len();
        let version = self.version_mut(key)?;
        if version.place != Place::Staged {
            return Err(state(key, "load", version.place));
        }
        let index = index.ok_or(LedgerError::NoSlot(slots))?;
        let slot = Slot::new(u16::try_from(index).map_err(|_| LedgerError::NoSlot(slots))?);
        version.place = Place::Loading(slot);
        self.slots[index] = Some(key.clone());
        Ok(slot)
    }

    /// The bytes have been seen to arrive and the table rows are in stream order before the next step.
    pub fn finish_load(&mut self, key: &AdapterKey) -> Result<Slot, LedgerError> {
        let version = self.version_mut(key)?;
        match version.place {
            Place::Loading(slot) => {
                version.place = Place::Hot(slot);
                Ok(slot)
            }
            place => Err(state(key, "become hot", place)),
        }
    }

    /// The load did not come to be; the slot is free again.
    pub fn abort_load(&mut self, key: &AdapterKey) -> Result<(), LedgerError> {
        let version = self.version_mut(key)?;
        match version.place {
            Place::Loading(slot) => {
                version.place = Place::Staged;
                self.slots[slot.index()] = None;
                Ok(())
            }
            place => Err(state(key, "stop loading", place)),
        }
    }

    /// The image of a version that is in host memory alone is given up.
    pub fn cool(&mut self, key: &AdapterKey) -> Result<(), LedgerError> {
        self.step_between(key, (Place::Staged, Place::Cold), "be given up")
    }

    /// It was read again.
    pub fn warm(&mut self, key: &AdapterKey) -> Result<(), LedgerError> {
        self.step_between(key, (Place::Cold, Place::Staged), "be read again")
    }

    fn step_between(
        &mut self,
        key: &AdapterKey,
        (from, to): (Place, Place),
        action: &'static str,
    ) -> Result<(), LedgerError> {
        let version = self.version_mut(key)?;
        if version.place != from {
            return Err(state(key, action, version.place));
        }
        version.place = to;
        Ok(())
    }

    /// The version to evict: least recently used of those that nobody uses and `protected` spares.
    pub fn evictable(&self, completed: Step, protected: &[AdapterKey]) -> Option<AdapterKey> {
        let here = self.slots.iter().flatten();
        here.filter_map(|key| Some((key, self.versions.get(key)?)))
            .filter(|(key, version)| {
                matches!(version.place, Place::Hot(_))
                    && version.idle(completed)
                    && !protected.contains(key)
            })
            .min_by_key(|(_, version)| version.last_step)
            .map(|(key, _)| key.clone())
    }

    /// Takes a version out of its slot.
    pub fn evict(&mut self, key: &AdapterKey, completed: Step) -> Result<Slot, LedgerError> {
        let version = self.version_mut(key)?;
        let Place::Hot(slot) = version.place else {
            return Err(state(key, "be evicted", version.place));
        };
        if !version.idle(completed) {
            return Err(LedgerError::InUse(key.to_string()));
        }
        version.place = Place::Staged;
        self.slots[slot.index()] = None;
        Ok(slot)
    }

    /// Notes that `step` reads the blocks of `slot`.
    pub fn used(&mut self, slot: Slot, step: Step) {
        if let Some(key) = self.slots.get(slot.index()).cloned().flatten()
            && let Some(version) = self.versions.get_mut(&key)
        {
            version.last_step = version.last_step.max(step);
        }
    }

    /// Ends retired versions that nobody has any more; the caller frees what they held. A version that
    /// is loading ends after its copy.
    pub fn sweep(&mut self, completed: Step) -> Vec<AdapterKey> {
        let is_over = |key: &&AdapterKey| {
            self.versions.get(*key).is_some_and(|version| {
                version.pins() == 0
                    && version.idle(completed)
                    && !matches!(version.place, Place::Loading(_))
            })
        };
        let over: Vec<AdapterKey> = self.retired.iter().filter(is_over).cloned().collect();
        for key in &over {
            self.revision += 1;
            self.retired.remove(key);
            if let Some(version) = self.versions.remove(key)
                && let Place::Hot(slot) = version.place
            {
                self.slots[slot.index()] = None;
            }
        }
        over
    }

    /// All versions, by name.
    pub fn list(&self) -> Vec<AdapterLine> {
        let line = |(key, version): (&AdapterKey, &Version)| AdapterLine {
            key: key.clone(),
            place: version.place,
            draining: self.retired.contains(key),
            pins: Arc::downgrade(&version.pins),
        };
        self.versions.iter().map(line).collect()
    }

    /// Changes whenever the list does, its counts of requests apart.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// Versions that steps can use now.
    pub fn hot(&self) -> usize {
        let hot = |key: &&AdapterKey| matches!(self.place(key), Some(Place::Hot(_)));
        self.slots.iter().flatten().filter(hot).count()
    }

    /// A version that is about to change.
    fn version_mut(&mut self, key: &AdapterKey) -> Result<&mut Version, LedgerError> {
        self.revision += 1;
        self.versions.get_mut(key).ok_or_else(|| LedgerError::Unknown(key.to_string()))
    }
}

fn state(key: &AdapterKey, action: &'static str, place: Place) -> LedgerError {
    LedgerError::State { key: key.to_string(), action, state: place.name() }
}
