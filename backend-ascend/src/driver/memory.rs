//! Device bytes and pinned host bytes.

use amphora_hal::{ALIGN, Error, HostBytes, Pool, Result, Span};

use super::{Context, Stream, acl, is_out_of_memory};
use crate::sys;

/// Kept behind every reservation: operators may read a tensor's last 32 bytes to their end.
const TAIL: usize = 32;

/// Device bytes, aligned to [`ALIGN`] (the runtime gives 64) and zeroed.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    context: Context,
    /// What the runtime gave.
    base: usize,
    /// The first aligned byte in it.
    address: usize,
    len: usize,
}

/// What a reservation of `len` bytes takes from the device.
pub(crate) fn padded(len: usize) -> Option<usize> {
    len.checked_next_multiple_of(TAIL)?.checked_add(TAIL + ALIGN)
}

impl DeviceMemory {
    /// Takes `len` bytes.
    ///
    /// # Errors
    /// `OutOfMemory`, or the runtime's.
    pub(crate) fn new(context: &Context, pool: Pool, len: usize) -> Result<Self> {
        let (api, none) = (context.enter()?, Error::OutOfMemory { pool, wanted: len, left: 0 });
        let bytes = padded(len).ok_or_else(|| none.clone())?;
        let mut base = std::ptr::null_mut();
        let policy = sys::ACL_MEM_MALLOC_HUGE_FIRST;
        // SAFETY: `base` is valid for the write.
        if let Err(error) = unsafe { acl!(api, aclrtMalloc(&raw mut base, bytes, policy)) } {
            return Err(if is_out_of_memory(&error) { none } else { error });
        }
        let base = base as usize;
        let memory = DeviceMemory {
            context: context.clone(),
            base,
            address: base.next_multiple_of(ALIGN),
            len,
        };
        // SAFETY: the runtime gave `bytes` at `base`.
        unsafe { acl!(api, aclrtMemset(base as _, bytes, 0, bytes)) }?;
        Ok(memory)
    }

    /// The device's address of the first byte.
    pub(crate) fn address(&self) -> usize {
        self.address
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // Work that uses the bytes may still run. Errors have no one left to go to.
        let _ = self.context.synchronize();
        if let Ok(api) = self.context.enter() {
            // SAFETY: `aclrtMalloc` gave this address, and it is freed once.
            let _ = unsafe { acl!(api, aclrtFree(self.base as _)) };
        }
    }
}

/// Pinned host bytes, zeroed.
#[derive(Debug)]
pub struct PinnedMemory {
    context: Context,
    address: usize,
    len: usize,
}

impl PinnedMemory {
    /// Takes `len` bytes.
    ///
    /// # Errors
    /// The runtime's.
    pub(crate) fn new(context: &Context, len: usize) -> Result<Self> {
        let api = context.enter()?;
        let mut address = std::ptr::null_mut();
        // The runtime refuses 0 bytes.
        let bytes = len.max(1);
        // SAFETY: `address` is valid for the write.
        unsafe { acl!(api, aclrtMallocHost(&raw mut address, bytes)) }?;
        // SAFETY: the runtime gave `bytes` of host memory at this address.
        unsafe { address.cast::<u8>().write_bytes(0, bytes) };
        Ok(PinnedMemory { context: context.clone(), address: address as usize, len })
    }

    /// Gives the bytes up for ever, to a copy engine that nobody can stop, and leaves no bytes.
    pub(super) fn leak(mut self) -> Self {
        let context = self.context.clone();
        self.address = 0;
        PinnedMemory { context, address: 0, len: 0 }
    }

    /// Copies `spans` of these bytes to device memory at `to`, in stream order.
    ///
    /// # Errors
    /// The runtime's.
    ///
    /// # Safety
    /// The spans lie in both sides; and until an event recorded behind the copies has passed, these
    /// bytes are not touched or dropped and the device memory stays reserved.
    pub(super) unsafe fn upload(
        &self,
        stream: &mut Stream,
        spans: &[Span],
        to: usize,
    ) -> Result<()> {
        for span in spans.iter().filter(|span| span.len > 0) {
            // SAFETY: this function's own contract, span by span.
            unsafe { stream.copy(to + span.to, self.address + span.from, span.len, true) }?;
        }
        Ok(())
    }

    /// Copies `bytes` of device memory at `from` to the front of these bytes, in stream order.
    ///
    /// # Errors
    /// The runtime's.
    ///
    /// # Safety
    /// As [`PinnedMemory::upload`].
    pub(super) unsafe fn download(
        &self,
        stream: &mut Stream,
        from: usize,
        bytes: usize,
    ) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: this function's own contract.
        unsafe { stream.copy(self.address, from, bytes, false) }
    }
}

impl HostBytes for PinnedMemory {
    fn bytes(&self) -> &[u8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: `len` initialised bytes of ours. No copy writes them meanwhile: a transfer takes
        // the buffer by value and gives it back when its event has passed.
        unsafe { std::slice::from_raw_parts(self.address as *const u8, self.len) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        if self.len == 0 {
            return &mut [];
        }
        // SAFETY: as in `bytes`, and `&mut self` is the only way to them.
        unsafe { std::slice::from_raw_parts_mut(self.address as *mut u8, self.len) }
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        if self.address == 0 {
            return; // Given up by `leak`.
        }
        if let Ok(api) = self.context.enter() {
            // SAFETY: `aclrtMallocHost` gave this address, and it is freed once; no copy uses it (see
            // `bytes`). Errors have no one left to go to.
            let _ = unsafe { acl!(api, aclrtFreeHost(self.address as _)) };
        }
    }
}
