//! Copies between host and device. The host buffer moves in and comes back when the copy has
//! passed, so bytes that a copy engine still uses cannot be touched.

use crate::device::Device;
use crate::error::{Error, Result};

/// A stretch of bytes to copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// First byte in the host buffer.
    pub from: usize,
    /// First byte in the tensor.
    pub to: usize,
    /// Bytes.
    pub len: usize,
}

impl Span {
    /// The first `len` bytes of both sides.
    pub fn front(len: usize) -> Self {
        Span { from: 0, to: 0, len }
    }

    /// Checks that `spans` stay inside `host` and `tensor` bytes.
    ///
    /// # Errors
    /// One leaves either side.
    pub fn check_all(spans: &[Span], host: usize, tensor: usize) -> Result<()> {
        for span in spans {
            let inside =
                |start: usize, of: usize| start.checked_add(span.len).is_some_and(|end| end <= of);
            if !inside(span.from, host) || !inside(span.to, tensor) {
                return Err(Error::invalid(
                    "upload",
                    format!("{span:?} with {host} host bytes and {tensor} tensor bytes"),
                ));
            }
        }
        Ok(())
    }
}

/// What a transfer gives: the buffer in flight, or at once the buffer and the reason.
pub type Sent<D> = std::result::Result<InFlight<D>, Returned<<D as Device>::Host>>;

/// A host buffer that comes back because its transfer did not start.
#[derive(Debug)]
pub struct Returned<H> {
    /// The buffer, untouched.
    pub host: H,
    /// Why the transfer did not start.
    pub error: Error,
}

impl<H> From<Returned<H>> for Error {
    fn from(returned: Returned<H>) -> Self {
        returned.error
    }
}

/// A host buffer that a copy may still use.
///
/// Dropping it waits for the copy. If the device is lost, the buffer is leaked: nobody can say
/// any more when the copy engine is done with it.
#[derive(Debug)]
pub struct InFlight<D: Device> {
    device: D,
    event: D::Event,
    host: Option<D::Host>,
}

impl<D: Device> InFlight<D> {
    /// Made by a backend: `event` lies behind the copy on its stream.
    pub fn new(device: D, host: D::Host, event: D::Event) -> Self {
        InFlight { device, event, host: Some(host) }
    }

    /// Whether the copy has passed; asks, never waits.
    ///
    /// # Errors
    /// The device is lost.
    pub fn is_done(&self) -> Result<bool> {
        self.device.is_done(&self.event)
    }

    /// Waits for the copy and gives the buffer back.
    ///
    /// # Errors
    /// The device is lost; the buffer is then leaked.
    pub fn finish(mut self) -> Result<D::Host> {
        if let Err(error) = self.device.block_on(&self.event) {
            std::mem::forget(self.host.take());
            return Err(error);
        }
        Ok(self.host.take().expect("only finish and drop take the buffer, and each runs once"))
    }
}

impl<D: Device> Drop for InFlight<D> {
    fn drop(&mut self) {
        if let Some(host) = self.host.take()
            && self.device.block_on(&self.event).is_err()
        {
            std::mem::forget(host);
        }
    }
}
