//! What running an operator needs: the device and the stream it goes on.

use crate::device::Device;

/// Passed by hand through a model's forward pass; there is no hidden current device or stream.
#[derive(Debug)]
pub struct Ctx<'a, D: Device> {
    /// The device.
    pub device: &'a D,
    /// The stream that operators are put on, in program order.
    pub stream: &'a mut D::Stream,
}
