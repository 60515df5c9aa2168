//! Reservations: bytes by pool against a limit, and the seal.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use amphora_hal::{DeviceBytes, Error, MemoryReport, Pool, Result};

use super::Context;
use super::memory::{DeviceMemory, padded};

/// The reservations of a device.
#[derive(Debug)]
pub(crate) struct Pools {
    limit: usize,
    reserved: Mutex<[usize; 4]>,
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
        Pools { limit, reserved: Mutex::default(), sealed: AtomicBool::new(false) }
    }

    pub(crate) fn seal(&self) {
        self.sealed.store(true, Ordering::Release);
    }

    pub(crate) fn report(&self) -> MemoryReport {
        MemoryReport {
            reserved: *self.reserved.lock().unwrap_or_else(PoisonError::into_inner),
            limit: self.limit,
        }
    }

    /// # Errors
    /// The pools are sealed.
    pub(crate) fn check_open(&self, pool: Pool, wanted: usize) -> Result<()> {
        if self.sealed.load(Ordering::Acquire) {
            return Err(Error::Sealed { pool, wanted });
        }
        Ok(())
    }

    /// Takes bytes from a pool; what alignment and tails cost counts too.
    pub(crate) fn reserve(
        self: &Arc<Self>,
        context: &Context,
        pool: Pool,
        len: usize,
    ) -> Result<Buffer> {
        self.check_open(pool, len)?;
        let mut reserved = self.reserved.lock().unwrap_or_else(PoisonError::into_inner);
        let left = self.limit.saturating_sub(reserved.iter().sum());
        let cost = padded(len).filter(|cost| *cost <= left);
        let Some(cost) = cost else {
            return Err(Error::OutOfMemory { pool, wanted: len, left });
        };
        let memory = DeviceMemory::new(context, pool, len)?;
        reserved[pool as usize] += cost;
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
        let mut reserved = self.pools.reserved.lock().unwrap_or_else(PoisonError::into_inner);
        reserved[self.pool as usize] -= padded(self.memory.len()).unwrap_or(0);
    }
}
