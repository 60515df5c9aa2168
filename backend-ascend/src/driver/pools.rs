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
pub struct Buffer {
    memory: DeviceMemory,
    pools: Arc<Pools>,
    pool: Pool,
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
        report.reserved[pool as usize] += cost;
        Ok(Buffer { memory, pools: self.clone(), pool })
    }
}

impl Buffer {
    /// The device's address of the first byte.
    pub(crate) fn address(&self) -> usize {
        self.memory.address()
    }
}

impl DeviceBytes for Buffer {
    fn len(&self) -> usize {
        self.memory.len()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let cost = padded(self.memory.len()).unwrap_or(0);
        self.pools.lock().reserved[self.pool as usize] -= cost;
    }
}
