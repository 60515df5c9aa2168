//! The one launch call, and what operators need to make a kernel's arguments.

use amphora_cuda_kernels::{Args, DevicePtr, Entry, args};
use amphora_hal::{ALIGN, DType, Error, OpKey, OpKind, Result, Scheme, Tensor};

use crate::device::{Cuda, CudaStream};
use crate::driver::cublaslt::{Operands, Shape};
use crate::driver::{Function, Geometry};
use crate::heuristics::dense::SHRUNK_BYTES;
use crate::heuristics::{CLEARED_BYTES, COUNTER_BYTES};
use crate::jit::Variant;

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
    let function = cuda.kernels().get(entry, element)?;
    enqueue(cuda, stream, (entry, function, None), geometry, args)
}

/// Whether all blocks of a launch run at once on a device that runs nothing else: what a kernel needs whose
/// blocks wait for each other. A grid of one cluster for every two processors may not, where a group of
/// processors has an odd number of them.
pub(crate) fn runs_at_once<A: Args>(
    cuda: &Cuda,
    stream: &CudaStream,
    (entry, element): (Entry<A>, DType),
    geometry: Geometry,
) -> Result<bool> {
    let function = cuda.kernels().get(entry, element)?;
    let threads = entry.id().kernel().threads;
    stream.raw.runs_at_once(function, Geometry { threads, ..geometry })
}

/// Puts a kernel that is made for some constants on the stream.
pub(crate) fn launch_variant<A: Args>(
    cuda: &Cuda,
    stream: &mut CudaStream,
    (entry, element, variant): (Entry<A>, DType, Variant),
    geometry: Geometry,
    args: &A,
) -> Result<()> {
    resolve(cuda, (entry, element, variant))?.launch(cuda, stream, geometry, args)
}

/// A kernel that is made for some constants, ready to be launched.
pub(crate) struct Resolved<A: Args> {
    entry: Entry<A>,
    function: Function,
    variant: Variant,
}

/// Finds a kernel that is made for some constants, or compiles it. Launches that must happen all or not at
/// all are resolved before the first is put on the stream.
pub(crate) fn resolve<A: Args>(
    cuda: &Cuda,
    (entry, element, variant): (Entry<A>, DType, Variant),
) -> Result<Resolved<A>> {
    let function = cuda.kernels().variant(entry, element, variant)?;
    Ok(Resolved { entry, function, variant })
}

impl<A: Args> Resolved<A> {
    /// Puts it on the stream.
    pub(crate) fn launch(
        &self,
        cuda: &Cuda,
        stream: &mut CudaStream,
        geometry: Geometry,
        args: &A,
    ) -> Result<()> {
        enqueue(cuda, stream, (self.entry, &self.function, Some(self.variant)), geometry, args)
    }
}

fn enqueue<A: Args>(
    cuda: &Cuda,
    stream: &mut CudaStream,
    (entry, function, variant): (Entry<A>, &Function, Option<Variant>),
    geometry: Geometry,
    args: &A,
) -> Result<()> {
    if let Some(what) = geometry.excess(cuda.limits().shared) {
        let name = entry.id().kernel().name;
        return Err(Error::invalid("launch", format!("{name} asks for {what}")));
    }
    let geometry = Geometry { threads: entry.id().kernel().threads, ..geometry };
    // SAFETY: `Entry` ties the kernel to `A`, whose layout both sides assert, and both callers look
    // `function` up by it. Addresses come from tensors of a `Checked` operator, whose shapes the kernel
    // stays within, and from the stream's workspace; indices were checked by the plan builder or made
    // in range by an operator. Buffers wait for the device before they are freed.
    unsafe { stream.raw.launch(function, geometry, args) }?;
    if let Some(launches) = cuda.launches() {
        launches.add(entry.id().kernel().name, variant, geometry);
    }
    stream.launched(entry.id().kernel().name)
}

/// What a product of the vendor's library is called among kernels, whose names it does not tell.
const LIBRARY_PRODUCT: &str = "cublasLtMatmul";

/// Puts a product of the vendor's library on the stream: x, weight, f32 sums and workspace lie at `places`.
pub(crate) fn launch_library(
    cuda: &Cuda,
    stream: &mut CudaStream,
    shape: Shape,
    places: [DevicePtr; 4],
) -> Result<()> {
    let Some(library) = cuda.products() else {
        return Err(Error::invalid("launch", "the vendor's products are not installed"));
    };
    let [x, weight, out, workspace] = places.map(|place| place.0);
    let operands = Operands { x, weight, out, workspace };
    // SAFETY: x and the weight are tensors of a `Checked` operator with the shape's rows, sums and
    // workspace pieces of the stream's workspace of the sizes that the shape says. Buffers wait for the
    // device before they are freed.
    unsafe { library.product(&mut stream.raw, shape, operands) }?;
    if let Some(launches) = cuda.launches() {
        launches.add(LIBRARY_PRODUCT, None, Geometry::new([1; 3]));
    }
    stream.launched(LIBRARY_PRODUCT)
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

/// Pieces of a stream's workspace, front to back. No piece covers its last bytes.
#[derive(Debug)]
pub(crate) struct Workspace {
    address: u64,
    len: usize,
    used: usize,
}

impl Workspace {
    pub(crate) fn of(stream: &CudaStream) -> Self {
        let (address, bytes) =
            stream.workspace.as_ref().map_or((0, 0), |buffer| (buffer.address(), buffer.bytes()));
        let len = bytes.saturating_sub(CLEARED_BYTES) / ALIGN * ALIGN;
        Workspace { address, len, used: 0 }
    }

    /// The next `bytes`.
    pub(crate) fn take(&mut self, bytes: usize) -> Result<DevicePtr> {
        let at = self.used;
        self.used = at + bytes.next_multiple_of(ALIGN);
        if self.used > self.len {
            let what = format!("{} of {} bytes of workspace", self.used, self.len);
            return Err(Error::invalid("workspace", what));
        }
        Ok(DevicePtr(self.address + at as u64))
    }

    /// `bytes` behind all that was taken, which the next piece may be too.
    pub(crate) fn rest(&self, bytes: usize) -> Result<DevicePtr> {
        Workspace { ..*self }.take(bytes)
    }

    /// The memory behind the counters, zero when the stream was made. Expert products write there, but for
    /// its last part, which is `dense_cleared`'s, and leave zeros where their next call needs them.
    pub(crate) fn cleared(&self) -> Result<DevicePtr> {
        Ok(DevicePtr(self.counters()?.0 + COUNTER_BYTES as u64))
    }

    /// The same for dense products whose clusters make shrunk rows: their state, a quarter of the counters
    /// that nothing else counts in, and the numbers.
    pub(crate) fn dense_cleared(&self) -> Result<[DevicePtr; 2]> {
        let counters = self.counters()?.0;
        let numbers = counters + (CLEARED_BYTES - SHRUNK_BYTES) as u64;
        Ok([DevicePtr(counters + COUNTER_BYTES as u64 / 2), DevicePtr(numbers)])
    }

    /// [`COUNTER_BYTES`] bytes that were zero when the stream was made, and that an operator which
    /// counts in them leaves zero for its own next call.
    pub(crate) fn counters(&self) -> Result<DevicePtr> {
        if self.len == 0 {
            return Err(Error::invalid("workspace", "a stream without any".to_owned()));
        }
        Ok(DevicePtr(self.address + self.len as u64))
    }
}
