//! What running an operator needs: the device and the stream it goes on.

use crate::device::Device;
use crate::error::Result;
use crate::profile::Mark;

/// Passed by hand through a model's forward pass; there is no hidden current device or stream.
#[derive(Debug)]
pub struct Ctx<'a, D: Device> {
    /// The device.
    pub device: &'a D,
    /// The stream that operators are put on, in program order.
    pub stream: &'a mut D::Stream,
}

impl<D: Device> Ctx<'_, D> {
    /// Runs what marks layers. The last of them ends with it, also where it fails half-way: what is put on
    /// the stream next belongs to no layer.
    ///
    /// # Errors
    /// As `layers`.
    pub fn in_layers<T>(&mut self, layers: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let done = layers(self);
        self.device.mark(self.stream, Mark::Layer(None));
        done
    }
}
