//! The vendor's operators on our tensors: descriptors, both phases, workspace.

use amphora_hal::{ALIGN, Error, Pool, Result, Tensor};

use crate::Ascend;
use crate::driver::{Executor, ScalarArg, Stream, TensorArg, View, data_type};

/// A stream's workspace, taken from the front; what is left goes to the vendor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scratch {
    address: usize,
    left: usize,
}

impl Scratch {
    pub(crate) fn of(stream: &Stream) -> Self {
        let (address, left) = stream.workspace();
        Scratch { address, left }
    }

    /// The address of the next `bytes`.
    ///
    /// # Errors
    /// The stream was made with less workspace than the operator's bounds say.
    pub(crate) fn take(&mut self, bytes: usize) -> Result<usize> {
        let padded = bytes.next_multiple_of(ALIGN);
        if padded > self.left {
            return Err(Error::OutOfMemory {
                pool: Pool::Scratch,
                wanted: padded,
                left: self.left,
            });
        }
        let address = self.address;
        self.address += padded;
        self.left -= padded;
        Ok(address)
    }

    /// What is left: address and bytes.
    pub(crate) fn rest(&self) -> (usize, usize) {
        (self.address, self.left)
    }
}

/// The device's address of a tensor's first element.
pub(crate) fn address(tensor: &Tensor<Ascend>) -> usize {
    tensor.buffer().address() + tensor.offset()
}

/// A tensor as an operator sees it.
pub(crate) fn view(tensor: &Tensor<Ascend>) -> View {
    let signed = |values: &[usize]| values.iter().map(|v| *v as i64).collect();
    View {
        address: address(tensor),
        dims: signed(tensor.dims()),
        strides: signed(tensor.shape().strides()),
        dtype: data_type(tensor.dtype()),
    }
}

/// out = left · right.
pub(crate) fn matmul(
    stream: &mut Stream,
    scratch: &Scratch,
    (left, right): (&View, &View),
    out: &View,
) -> Result<()> {
    let context = stream.context().clone();
    let left = TensorArg::new(&context, left)?;
    let right = TensorArg::new(&context, right)?;
    let out = TensorArg::new(&context, out)?;
    Executor::matmul(&left, &right, &out)?.run(stream, scratch.rest())
}

/// out = x / sqrt(mean(x²) + eps) · gamma over the last dimension. `rstd` is f32, `x`'s shape with a
/// last dimension of 1.
pub(crate) fn rms_norm(
    stream: &mut Stream,
    scratch: &Scratch,
    (x, gamma, eps): (&View, &View, f32),
    (out, rstd): (&View, &View),
) -> Result<()> {
    let context = stream.context().clone();
    let x = TensorArg::new(&context, x)?;
    let gamma = TensorArg::new(&context, gamma)?;
    let out = TensorArg::new(&context, out)?;
    let rstd = TensorArg::new(&context, rstd)?;
    Executor::rms_norm((&x, &gamma), eps, (&out, &rstd))?.run(stream, scratch.rest())
}

/// target += other.
pub(crate) fn add(
    stream: &mut Stream,
    scratch: &Scratch,
    target: &View,
    other: &View,
) -> Result<()> {
    let context = stream.context().clone();
    let target = TensorArg::new(&context, target)?;
    let other = TensorArg::new(&context, other)?;
    let one = ScalarArg::new(&context, 1.0)?;
    Executor::add(&target, &other, &one)?.run(stream, scratch.rest())
}

/// target = source.
pub(crate) fn copy(
    stream: &mut Stream,
    scratch: &Scratch,
    target: &View,
    source: &View,
) -> Result<()> {
    let context = stream.context().clone();
    let target = TensorArg::new(&context, target)?;
    let source = TensorArg::new(&context, source)?;
    Executor::copy(&target, &source)?.run(stream, scratch.rest())
}
