//! Host images of adapters, as many as fit a budget of bytes.
//!
//! One that has files to be read again may be given up, the least recently wanted first; one that was made
//! in memory has none and stays.

use std::collections::BTreeMap;

use amphora_hal::Backend;
use amphora_model::adapter_image::AdapterImage;

use super::ledger::AdapterKey;
use super::reader::Origin;

struct Stored<B: Backend> {
    /// `None` when it was given up.
    image: Option<AdapterImage<B>>,
    bytes: usize,
    origin: Option<Origin>,
    /// When it was last wanted; later is larger.
    wanted: u64,
    reading: bool,
}

/// The images of all versions.
pub(super) struct Images<B: Backend> {
    stored: BTreeMap<AdapterKey, Stored<B>>,
    /// Bytes of those that are here.
    bytes: usize,
    budget: usize,
    clock: u64,
}

impl<B: Backend> Images<B> {
    pub fn new(budget: usize) -> Self {
        Images { stored: BTreeMap::new(), bytes: 0, budget, clock: 0 }
    }

    /// Bytes of the images that are here.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn over_budget(&self) -> bool {
        self.bytes > self.budget
    }

    pub fn insert(&mut self, key: AdapterKey, image: AdapterImage<B>, origin: Option<Origin>) {
        self.clock += 1;
        let bytes = image.bytes();
        self.bytes += bytes;
        let wanted = self.clock;
        let stored = Stored { image: Some(image), bytes, origin, wanted, reading: false };
        self.stored.insert(key, stored);
    }

    pub fn remove(&mut self, key: &AdapterKey) {
        self.give_up(key);
        self.stored.remove(key);
    }

    pub fn get(&self, key: &AdapterKey) -> Option<&AdapterImage<B>> {
        self.stored.get(key)?.image.as_ref()
    }

    pub fn get_mut(&mut self, key: &AdapterKey) -> Option<&mut AdapterImage<B>> {
        self.stored.get_mut(key)?.image.as_mut()
    }

    /// Notes that somebody waits for it.
    pub fn touch(&mut self, key: &AdapterKey) {
        self.clock += 1;
        if let Some(stored) = self.stored.get_mut(key) {
            stored.wanted = self.clock;
        }
    }

    /// Where to read one that is not here; `None` while it is being read.
    pub fn begin_reading(&mut self, key: &AdapterKey) -> Option<Origin> {
        let stored = self.stored.get_mut(key)?;
        if stored.image.is_some() || std::mem::replace(&mut stored.reading, true) {
            return None;
        }
        stored.origin.clone()
    }

    /// Takes what was read; whether it is still wanted.
    pub fn end_reading(&mut self, key: &AdapterKey, image: Option<AdapterImage<B>>) -> bool {
        let Some(stored) = self.stored.get_mut(key) else { return false };
        stored.reading = false;
        if let Some(image) = image {
            self.bytes += stored.bytes;
            stored.image = Some(image);
        }
        true
    }

    /// The image to give up next, of those that can be read again and `may_go`.
    pub fn least_wanted(&self, may_go: impl Fn(&AdapterKey) -> bool) -> Option<AdapterKey> {
        let here = |stored: &Stored<B>| stored.image.is_some() && stored.origin.is_some();
        self.stored
            .iter()
            .filter(|(key, stored)| here(stored) && may_go(key))
            .min_by_key(|(_, stored)| stored.wanted)
            .map(|(key, _)| key.clone())
    }

    /// Frees an image.
    pub fn give_up(&mut self, key: &AdapterKey) {
        if let Some(stored) = self.stored.get_mut(key)
            && stored.image.take().is_some()
        {
            self.bytes -= stored.bytes;
        }
    }
}
