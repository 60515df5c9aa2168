//! Counts of what crossed between host and device. A promise about a step is asserted from these.

/// Totals since the device was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Calls of [`crate::Device::upload`].
    pub uploads: u64,
    /// Bytes that uploads moved.
    pub upload_bytes: u64,
    /// Calls of [`crate::Device::download`].
    pub downloads: u64,
    /// Bytes that downloads moved.
    pub download_bytes: u64,
    /// Operators put on a stream one at a time (a replay counts in `replays`).
    pub launches: u64,
    /// Recorded graphs replayed.
    pub replays: u64,
    /// Times the host waited for the device.
    pub waits: u64,
    /// Device allocations: reservations of a pool.
    pub allocations: u64,
    /// Units of device code that were compiled, when the device was opened or later.
    pub compilations: u64,
    /// Modules of machine code that were loaded, when the device was opened or later.
    pub modules: u64,
}

impl Counters {
    /// What happened between `earlier` and `self`.
    pub fn since(&self, earlier: &Counters) -> Counters {
        Counters {
            uploads: self.uploads - earlier.uploads,
            upload_bytes: self.upload_bytes - earlier.upload_bytes,
            downloads: self.downloads - earlier.downloads,
            download_bytes: self.download_bytes - earlier.download_bytes,
            launches: self.launches - earlier.launches,
            replays: self.replays - earlier.replays,
            waits: self.waits - earlier.waits,
            allocations: self.allocations - earlier.allocations,
            compilations: self.compilations - earlier.compilations,
            modules: self.modules - earlier.modules,
        }
    }
}
