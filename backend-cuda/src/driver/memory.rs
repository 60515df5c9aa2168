//! Device bytes and pinned host bytes.

use std::ptr::NonNull;
use std::sync::Arc;

use amphora_hal::{Error, Result};
use cudarc::driver::sys;

use super::{Context, check};

/// One allocation of device memory, zeroed.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    context: Arc<Context>,
    address: u64,
    len: usize,
}

impl DeviceMemory {
    /// Allocates and clears `len` > 0 bytes; waits for the clearing.
    pub(crate) fn zeroed(context: &Arc<Context>, len: usize) -> Result<Self> {
        context.bind()?;
        let mut address = 0;
        // SAFETY: the context is current; writes one address.
        check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&mut address, len) })?;
        let memory = DeviceMemory { context: context.clone(), address, len };
        // SAFETY: the bytes are those just allocated.
        check("cuMemsetD8", unsafe { sys::cuMemsetD8_v2(address, 0, len) })?;
        // Streams here do not order against the null stream that cleared the bytes.
        context.synchronize()?;
        Ok(memory)
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // Work in flight may use the bytes. If the device is lost, freeing fails too, and no one cares.
        let _ = self.context.synchronize();
        // SAFETY: allocated once in `zeroed`, in the context that is current now.
        let _ = unsafe { sys::cuMemFree_v2(self.address) };
    }
}

/// Page-locked host bytes that the copy engine reads and writes.
#[derive(Debug)]
pub(crate) struct PinnedMemory {
    /// Of the allocation, if there is one.
    context: Option<Arc<Context>>,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the bytes are owned by this value alone and bound to no thread.
unsafe impl Send for PinnedMemory {}

impl PinnedMemory {
    /// No bytes and no allocation.
    pub(crate) fn empty() -> Self {
        PinnedMemory { context: None, start: NonNull::dangling(), len: 0 }
    }

    /// Zeroed bytes.
    pub(crate) fn zeroed(context: &Arc<Context>, len: usize) -> Result<Self> {
        if len == 0 {
            return Ok(PinnedMemory::empty());
        }
        context.bind()?;
        let mut start = std::ptr::null_mut();
        // No flags: memory of the write-combining kind would be slow for the host to read.
        // SAFETY: the context is current; writes one address.
        check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&mut start, len, 0) })?;
        let Some(start) = NonNull::new(start.cast::<u8>()) else {
            let message = "no address".to_owned();
            return Err(Error::Driver { call: "cuMemHostAlloc", code: 0, message });
        };
        // SAFETY: `len` bytes from `start` were just allocated.
        unsafe { start.write_bytes(0, len) };
        Ok(PinnedMemory { context: Some(context.clone()), start, len })
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes, owned by `self`; a copy in flight owns `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        let Some(context) = &self.context else { return };
        let _ = context.bind();
        // SAFETY: allocated once in `zeroed`. A copy that may still run owns this value and leaks it
        // rather than drop it (`InFlight`).
        let _ = unsafe { sys::cuMemFreeHost(self.start.as_ptr().cast()) };
    }
}
