//! The one launch call, and what operators need to make a kernel's arguments.

use amphora_cuda_kernels::{Args, DevicePtr, Entry, args};
use amphora_hal::{ALIGN, DType, Error, OpKey, OpKind, Result, Scheme, Tensor};

use crate::device::{Cuda, CudaStream};
use crate::driver::Geometry;

/// Puts a kernel on the stream. `element` is the compute type; a grid without blocks is nothing to do.
pub(crate) fn launch<A: Args>(
    cuda: &Cuda,
    stream: &mut CudaStream,
    entry: Entry<A>,
    element: DType,
    geometry: Geometry,
    args: &A,
) -> Result<()> {
    if geometry.grid.contains(&0) {
        return Ok(());
    }
    let most = cuda.limits().shared;
    if geometry.shared as usize > most {
        let name = entry.id().kernel().name;
        let what = format!("{name} asks for {} of {most} bytes of shared memory", geometry.shared);
        return Err(Error::invalid("launch", what));
    }
    let function = cuda.kernels().get(entry, element)?;
    let geometry = Geometry { threads: entry.id().kernel().threads, ..geometry };
    // SAFETY: `Entry` ties the kernel to `A`, whose layout both sides assert. Addresses come from
    // tensors of a `Checked` operator, whose shapes the kernel stays within, and from the stream's
    // workspace; indices were checked by the plan builder or made in range by an operator. Buffers
    // wait for the device before they are freed.
    unsafe { stream.raw.launch(function, geometry, args) }
}

/// Where a tensor starts.
pub(crate) fn ptr(tensor: &Tensor<Cuda>) -> DevicePtr {
    DevicePtr(tensor.buffer().address() + tensor.offset() as u64)
}

/// Where an optional tensor starts.
pub(crate) fn optional(tensor: Option<&Tensor<Cuda>>) -> DevicePtr {
    tensor.map_or(DevicePtr::NULL, ptr)
}

/// Elements from row to row of a tensor whose check asked for rows.
pub(crate) fn pitch(tensor: &Tensor<Cuda>) -> Result<i64> {
    let rows = tensor.shape().as_rows();
    let (_, pitch, _) = rows.ok_or_else(|| {
        Error::invalid("launch", format!("{} has no rows at one pitch", tensor.shape()))
    })?;
    i64::try_from(pitch).map_err(|_| too_large(pitch))
}

/// A size as kernels count.
pub(crate) fn int(size: usize) -> Result<i32> {
    i32::try_from(size).map_err(|_| too_large(size))
}

fn too_large(size: usize) -> Error {
    Error::invalid("launch", format!("size {size} is beyond what a kernel counts"))
}

/// The type of a weight's numbers, as arguments name it.
pub(crate) fn weight_type(op: OpKind, element: DType, scheme: Scheme) -> Result<i32> {
    match scheme {
        Scheme::Dense(DType::F32) => Ok(args::element::F32),
        Scheme::Dense(DType::F16) => Ok(args::element::F16),
        Scheme::Dense(DType::BF16) => Ok(args::element::BF16),
        _ => Err(Error::Unsupported {
            key: OpKey::new(op, element).scheme(scheme),
            reason: crate::pack::DENSE_ONLY,
        }),
    }
}

/// Pieces of a stream's workspace, front to back.
#[derive(Debug)]
pub(crate) struct Workspace {
    address: u64,
    len: usize,
    used: usize,
}

impl Workspace {
    pub(crate) fn of(stream: &CudaStream) -> Self {
        let (address, len) =
            stream.workspace.as_ref().map_or((0, 0), |buffer| (buffer.address(), buffer.bytes()));
        Workspace { address, len, used: 0 }
    }

    /// The next `bytes`.
    pub(crate) fn take(&mut self, bytes: usize) -> Result<DevicePtr> {
        let at = self.used;
        self.used = at + bytes.next_multiple_of(ALIGN);
        if self.used > self.len.next_multiple_of(ALIGN) {
            let what = format!("{} of {} bytes of workspace", self.used, self.len);
            return Err(Error::invalid("workspace", what));
        }
        Ok(DevicePtr(self.address + at as u64))
    }
}
