//! What a device has reserved, and what it has done: counts, no memory.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use amphora_hal::{Counters, Error, MemoryReport, Pool, Result};

/// What is reserved, and whether more may be.
#[derive(Debug)]
pub(super) struct Pools {
    report: Mutex<MemoryReport>,
    sealed: AtomicBool,
}

#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) uploads: AtomicU64,
    pub(super) upload_bytes: AtomicU64,
    pub(super) downloads: AtomicU64,
    pub(super) download_bytes: AtomicU64,
    pub(super) launches: AtomicU64,
    pub(super) replays: AtomicU64,
    pub(super) waits: AtomicU64,
    pub(super) allocations: AtomicU64,
}

pub(super) fn count(counter: &AtomicU64, by: usize) {
    counter.fetch_add(by as u64, Ordering::Relaxed);
}

impl Pools {
    pub(super) fn new(limit: usize) -> Arc<Self> {
        let report = Mutex::new(MemoryReport { reserved: [0; 4], limit });
        Arc::new(Pools { report, sealed: AtomicBool::new(false) })
    }

    pub(super) fn seal(&self) {
        self.sealed.store(true, Ordering::Release);
    }

    /// Whether reservations are over.
    ///
    /// # Errors
    /// They are.
    pub(super) fn check_open(&self, pool: Pool, wanted: usize) -> Result<()> {
        if self.sealed.load(Ordering::Acquire) {
            return Err(Error::Sealed { pool, wanted });
        }
        Ok(())
    }

    pub(super) fn report(&self) -> MemoryReport {
        *self.report.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a reservation, or says why there is none.
    pub(super) fn take(self: &Arc<Self>, pool: Pool, bytes: usize) -> Result<Reserved> {
        self.check_open(pool, bytes)?;
        let mut report = self.report.lock().unwrap_or_else(PoisonError::into_inner);
        let left = report.limit.saturating_sub(report.total());
        if bytes > left {
            return Err(Error::OutOfMemory { pool, wanted: bytes, left });
        }
        report.reserved[pool as usize] += bytes;
        Ok(Reserved { pools: self.clone(), pool, bytes })
    }

    /// Takes note that the device has no more than `free` bytes for `wanted` and what comes later, whatever
    /// the limit allowed: others have the rest. Says what is left.
    pub(super) fn found_free(&self, wanted: &Reserved, free: usize) -> usize {
        let mut report = self.report.lock().unwrap_or_else(PoisonError::into_inner);
        let held = report.total() - wanted.bytes;
        report.limit = report.limit.min(held + free);
        report.limit.saturating_sub(held)
    }
}

/// A reservation's share of a pool, given back with its buffer.
#[derive(Debug)]
pub(super) struct Reserved {
    pools: Arc<Pools>,
    pool: Pool,
    bytes: usize,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let mut report = self.pools.report.lock().unwrap_or_else(PoisonError::into_inner);
        report.reserved[self.pool as usize] -= self.bytes;
    }
}

impl Tally {
    /// All but what kernels say of themselves.
    pub(super) fn counters(&self) -> Counters {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counters {
            uploads: read(&self.uploads),
            upload_bytes: read(&self.upload_bytes),
            downloads: read(&self.downloads),
            download_bytes: read(&self.download_bytes),
            launches: read(&self.launches),
            replays: read(&self.replays),
            waits: read(&self.waits),
            allocations: read(&self.allocations),
            ..Counters::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pools_count_limit_and_seal() {
        let pools = Pools::new(100);
        let first = pools.take(Pool::Weights, 60).expect("it fits");
        assert_eq!(
            pools.take(Pool::KvCache, 41).map(drop),
            Err(Error::OutOfMemory { pool: Pool::KvCache, wanted: 41, left: 40 })
        );
        assert_eq!((pools.report().pool(Pool::Weights), pools.report().total()), (60, 60));
        drop(first);
        assert_eq!(pools.report().total(), 0);
        pools.seal();
        let sealed = pools.take(Pool::Scratch, 1).map(drop);
        assert_eq!(sealed, Err(Error::Sealed { pool: Pool::Scratch, wanted: 1 }));
    }

    /// What others took is no reservation of ours: the limit is lower, and what is left is what is free.
    #[test]
    fn memory_that_others_took_lowers_the_limit() {
        let pools = Pools::new(100);
        let first = pools.take(Pool::Weights, 30).expect("it fits");
        let second = pools.take(Pool::KvCache, 60).expect("the limit allows it");
        assert_eq!(pools.found_free(&second, 25), 25);
        drop(second);
        let report = pools.report();
        assert_eq!((report.limit, report.total()), (55, 30));
        let refused = pools.take(Pool::KvCache, 26).map(drop);
        assert_eq!(refused, Err(Error::OutOfMemory { pool: Pool::KvCache, wanted: 26, left: 25 }));
        // In pieces too large for what is free there may seem to be more than the limit.
        let second = pools.take(Pool::KvCache, 25).expect("it fits");
        assert_eq!(pools.found_free(&second, 80), 25);
        assert_eq!(pools.report().limit, 55);
        drop([first, second]);
    }
}
