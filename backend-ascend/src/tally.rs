//! Counts of what crossed between host and device.

use std::sync::atomic::{AtomicU64, Ordering};

use amphora_hal::Counters;

/// Totals since the device was opened.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) uploads: AtomicU64,
    pub(crate) upload_bytes: AtomicU64,
    pub(crate) downloads: AtomicU64,
    pub(crate) download_bytes: AtomicU64,
    pub(crate) launches: AtomicU64,
    pub(crate) replays: AtomicU64,
    pub(crate) waits: AtomicU64,
    pub(crate) allocations: AtomicU64,
}

/// Adds to a count.
pub(crate) fn count(counter: &AtomicU64, by: usize) {
    counter.fetch_add(by as u64, Ordering::Relaxed);
}

impl Tally {
    /// All but what the device's kernels say of themselves.
    pub(crate) fn totals(&self) -> Counters {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counters {
            uploads: get(&self.uploads),
            upload_bytes: get(&self.upload_bytes),
            downloads: get(&self.downloads),
            download_bytes: get(&self.download_bytes),
            launches: get(&self.launches),
            replays: get(&self.replays),
            waits: get(&self.waits),
            allocations: get(&self.allocations),
            ..Counters::default()
        }
    }
}
