//! Reservations: bytes by pool against a limit, and the seal.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use amphora_hal::{DeviceBytes, Error, MemoryReport, Pool, Result};

use super::Context;
use super::memory::{DeviceMemory, padded};

/// The reservations of a device.
#[derive(Debug)]
pub(crate) struct Pools {
    report: Mutex<MemoryReport>,
    sealed: AtomicBool,
}

/// Device bytes that belong to a pool.
#[derive(Debug)]
pub struct Buffer(Counted<DeviceMemory>);

/// Memory and its share of a pool. Fields are dropped in their order: what is counted as free has been given
/// back to the device, so a reservation that the count allows finds it there.
#[derive(Debug)]
struct Counted<M> {
    memory: M,
    _share: Share,
}

/// Bytes that count as reserved, for as long as this lives.
#[derive(Debug)]
struct Share {
    pools: Arc<Pools>,
    pool: Pool,
    bytes: usize,
}

impl Pools {
    pub(crate) fn new(limit: usize) -> Self {
        let report = Mutex::new(MemoryReport { reserved: [0; 4], limit });
        Pools { report, sealed: AtomicBool::new(false) }
    }

    pub(crate) fn seal(&self) {
        self.sealed.store(true, Ordering::Release);
    }

    pub(crate) fn report(&self) -> MemoryReport {
        *self.lock()
    }

    fn lock(&self) -> MutexGuard<'_, MemoryReport> {
        self.report.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// # Errors
    /// The pools are sealed.
    pub(crate) fn check_open(&self, pool: Pool, wanted: usize) -> Result<()> {
        if self.sealed.load(Ordering::Acquire) {
            return Err(Error::Sealed { pool, wanted });
        }
        Ok(())
    }

    /// Takes bytes from a pool; what alignment and tails cost counts too. Where the device lacks what the
    /// limit allows, others have it: the limit follows what is free now, and none of that counts as reserved.
    pub(crate) fn reserve(
        self: &Arc<Self>,
        context: &Context,
        pool: Pool,
        len: usize,
    ) -> Result<Buffer> {
        self.check_open(pool, len)?;
        let mut report = self.lock();
        let held = report.total();
        let left = report.limit.saturating_sub(held);
        let cost = padded(len).filter(|cost| *cost <= left);
        let Some(cost) = cost else {
            return Err(Error::OutOfMemory { pool, wanted: len, left });
        };
        let memory = DeviceMemory::new(context, pool, len).map_err(|error| match error {
            Error::OutOfMemory { .. } => {
                // A runtime that does not say what is free has nothing for us.
                let free = context.memory().map_or(0, |memory| memory.free);
                report.limit = report.limit.min(held.saturating_add(free));
                Error::OutOfMemory { pool, wanted: len, left: report.limit - held }
            }
            error => error,
        })?;
        let share = self.share(&mut report, pool, cost);
        Ok(Buffer(Counted { memory, _share: share }))
    }

    fn share(self: &Arc<Self>, report: &mut MemoryReport, pool: Pool, bytes: usize) -> Share {
        report.reserved[pool as usize] += bytes;
        Share { pools: self.clone(), pool, bytes }
    }
}

impl Buffer {
    /// The device's address of the first byte.
    pub(crate) fn address(&self) -> usize {
        self.0.memory.address()
    }
}

impl DeviceBytes for Buffer {
    fn len(&self) -> usize {
        self.0.memory.len()
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.pools.lock().reserved[self.pool as usize] -= self.bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Notes what counts as reserved while it is given back.
    struct Memory(Arc<Pools>, Arc<Mutex<Vec<usize>>>);

    impl Drop for Memory {
        fn drop(&mut self) {
            self.1.lock().expect("no panic").push(self.0.report().total());
        }
    }

    /// Were it free by the count before it is free on the device, another thread's reservation could be
    /// allowed and then fail, which would lower the limit for good.
    #[test]
    fn memory_counts_until_it_is_given_back() {
        let (pools, seen) = (Arc::new(Pools::new(100)), Arc::default());
        let share = pools.share(&mut pools.lock(), Pool::KvCache, 60);
        drop(Counted { memory: Memory(pools.clone(), Arc::clone(&seen)), _share: share });
        assert_eq!(*seen.lock().expect("no panic"), [60]);
        assert_eq!(pools.report().total(), 0);
    }
}
