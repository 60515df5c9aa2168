//! Tensors: a shape and a type over some bytes of a buffer. Handles, not owners of bytes.

use std::ops::Range;
use std::sync::Arc;

use crate::device::{Device, DeviceBytes};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::shape::{Extent, Shape};

/// Every tensor carved by [`Carver`] starts at a multiple of this.
pub const ALIGN: usize = 256;

/// A view of device bytes. Cloning gives another handle to the same bytes; which operands of an
/// operator may share bytes is judged by the operator's `check`.
#[derive(Debug)]
pub struct Tensor<D: Device> {
    buffer: Arc<D::Buffer>,
    offset: usize,
    shape: Shape,
    dtype: DType,
}

impl<D: Device> Clone for Tensor<D> {
    fn clone(&self) -> Self {
        Tensor { buffer: self.buffer.clone(), ..*self }
    }
}

impl<D: Device> Tensor<D> {
    /// A dense tensor at byte `offset` of `buffer`.
    ///
    /// # Errors
    /// The bytes leave the buffer, or the offset does not suit the type.
    pub fn new(
        buffer: Arc<D::Buffer>,
        offset: usize,
        dims: &[usize],
        dtype: DType,
    ) -> Result<Self> {
        let shape = Shape::dense(dims)?;
        let bytes = shape.elements().checked_mul(dtype.size());
        let end = bytes.and_then(|b| b.checked_add(offset));
        if end.is_none_or(|end| end > buffer.len()) || !offset.is_multiple_of(dtype.size()) {
            return Err(Error::invalid(
                "tensor",
                format!("{shape} of {dtype} at {offset} in a buffer of {} bytes", buffer.len()),
            ));
        }
        Ok(Tensor { buffer, offset, shape, dtype })
    }

    /// The buffer behind this tensor.
    pub fn buffer(&self) -> &Arc<D::Buffer> {
        &self.buffer
    }

    /// First byte in the buffer.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Extents and strides.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Extents, outermost first.
    pub fn dims(&self) -> &[usize] {
        self.shape.dims()
    }

    /// Bytes of all elements (gaps of a strided view not counted).
    pub fn bytes(&self) -> usize {
        self.shape.elements() * self.dtype.size()
    }

    /// The first `rows` of the outermost dimension.
    ///
    /// # Errors
    /// There are fewer.
    pub fn rows(&self, rows: usize) -> Result<Self> {
        self.narrow(0, 0, rows)
    }

    /// The part `[start, start + len)` of dimension `dim`.
    ///
    /// # Errors
    /// The range leaves the dimension.
    pub fn narrow(&self, dim: usize, start: usize, len: usize) -> Result<Self> {
        let (shape, skip) = self.shape.narrow(dim, start, len)?;
        Ok(Tensor {
            buffer: self.buffer.clone(),
            offset: self.offset + skip * self.dtype.size(),
            shape,
            dtype: self.dtype,
        })
    }

    /// The innermost dimension split into `[width / inner, inner]`: heads of a projection.
    ///
    /// # Errors
    /// As [`Shape::split_last`].
    pub fn split_last(&self, inner: usize) -> Result<Self> {
        Ok(Tensor { buffer: self.buffer.clone(), shape: self.shape.split_last(inner)?, ..*self })
    }

    /// The bytes this tensor may touch.
    pub fn extent(&self) -> Extent {
        let size = self.dtype.size();
        Extent {
            start: self.offset,
            len: self.shape.span() * size,
            rows: self.shape.as_rows().map(|(_, pitch, width)| (pitch * size, width * size)),
        }
    }

    /// Whether two tensors share a byte.
    pub fn overlaps(&self, other: &Tensor<D>) -> bool {
        Arc::ptr_eq(&self.buffer, &other.buffer) && self.extent().overlaps(&other.extent())
    }

    /// Whether two tensors are the same view of the same bytes.
    pub fn is_same(&self, other: &Tensor<D>) -> bool {
        Arc::ptr_eq(&self.buffer, &other.buffer)
            && (self.offset, self.shape, self.dtype) == (other.offset, other.shape, other.dtype)
    }
}

/// Device integers that address other tensors (block ids, positions, tokens, slots).
///
/// Kernels do not check ranges, so the type has no public constructor: its values come from a
/// [`crate::PlanBuilder`], which holds each against its bound, or from an operator that makes them
/// in range by construction. The bound goes with them, and an operator's `check` holds it against
/// what the values are to address.
#[derive(Debug)]
pub struct Index<D: Device> {
    tensor: Tensor<D>,
    values: Range<isize>,
}

impl<D: Device> Clone for Index<D> {
    fn clone(&self) -> Self {
        Index { tensor: self.tensor.clone(), values: self.values.clone() }
    }
}

impl<D: Device> Index<D> {
    pub(crate) fn new(tensor: Tensor<D>, values: Range<isize>) -> Self {
        Index { tensor, values }
    }

    /// Words that are no plain indices (tiles, table rows): nothing may be addressed with them.
    pub(crate) fn words(tensor: Tensor<D>) -> Self {
        Index::new(tensor, isize::MIN..isize::MAX)
    }

    /// What every value lies in; −1 marks padding.
    pub fn values(&self) -> &Range<isize> {
        &self.values
    }

    /// The integers, for reading.
    pub fn tensor(&self) -> &Tensor<D> {
        &self.tensor
    }
}

/// Cuts a buffer into aligned tensors, front to back.
#[derive(Debug)]
pub struct Carver<D: Device> {
    buffer: Arc<D::Buffer>,
    used: usize,
}

impl<D: Device> Carver<D> {
    /// Starts at the front of `buffer`.
    pub fn new(buffer: D::Buffer) -> Self {
        Carver { buffer: Arc::new(buffer), used: 0 }
    }

    /// The next tensor.
    ///
    /// # Errors
    /// The buffer is used up: a sum made beforehand was wrong.
    pub fn carve(&mut self, dims: &[usize], dtype: DType) -> Result<Tensor<D>> {
        let tensor = Tensor::new(self.buffer.clone(), self.used, dims, dtype)?;
        self.used += carved_bytes(dims, dtype);
        Ok(tensor)
    }
}

/// Bytes that [`Carver::carve`] takes for such a tensor, its padding to [`ALIGN`] included.
pub fn carved_bytes(dims: &[usize], dtype: DType) -> usize {
    (dims.iter().product::<usize>() * dtype.size()).next_multiple_of(ALIGN)
}
