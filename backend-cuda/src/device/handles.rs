//! What a device gives out: buffers, host bytes, streams, events, graphs.

use amphora_hal::{DeviceBytes, Error, HostBytes, Result};

use super::pools::Reserved;
use super::profile::Watch;
use crate::driver::nvtx::Ranges;
use crate::driver::{self, DeviceMemory, Graph, PinnedMemory};

/// Device bytes.
#[derive(Debug)]
pub struct CudaBuffer {
    pub(super) memory: DeviceMemory,
    pub(super) _reserved: Reserved,
}

impl CudaBuffer {
    pub(crate) fn address(&self) -> u64 {
        self.memory.address()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.memory.len()
    }
}

impl DeviceBytes for CudaBuffer {
    fn len(&self) -> usize {
        self.memory.len()
    }
}

/// Pinned host bytes.
#[derive(Debug)]
pub struct CudaHost(pub(super) PinnedMemory);

impl HostBytes for CudaHost {
    fn bytes(&self) -> &[u8] {
        self.0.bytes()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.0.bytes_mut()
    }
}

/// An in-order queue with its workspace.
#[derive(Debug)]
pub struct CudaStream {
    pub(crate) raw: driver::Stream,
    pub(crate) workspace: Option<CudaBuffer>,
    pub(super) capturing: bool,
    /// While a profile is taken.
    pub(super) watch: Option<Watch>,
    /// What a profiler sees open.
    pub(super) ranges: Ranges,
}

impl AsMut<driver::Stream> for CudaStream {
    fn as_mut(&mut self) -> &mut driver::Stream {
        &mut self.raw
    }
}

impl CudaStream {
    pub(super) fn new(raw: driver::Stream, workspace: Option<CudaBuffer>) -> Self {
        CudaStream { raw, workspace, capturing: false, watch: None, ranges: Ranges::default() }
    }

    /// Transfers and events are no part of a graph: what follows a capture could not be told apart
    /// from what was recorded.
    pub(super) fn outside_capture(&self, call: &'static str) -> Result<()> {
        if self.capturing {
            return Err(Error::invalid("capture", format!("{call} within a capture")));
        }
        Ok(())
    }
}

/// A point in a stream.
#[derive(Debug)]
pub struct CudaEvent(pub(super) driver::Event);

/// A recorded stretch of a stream.
#[derive(Debug)]
pub struct CudaGraph(pub(super) Graph);
