//! Tensor maps: how the copy engine of compute capability 9.0 finds boxes of a tensor.

use std::ffi::c_void;

use amphora_cuda_kernels::DevicePtr;
use amphora_cuda_kernels::args::TensorMap;
use amphora_hal::{DType, Error, Result};
use cudarc::driver::sys::{self, CUtensorMap};

use super::check;

/// A tensor of two-byte numbers and the boxes that are copied of it. Dimensions from the fastest on;
/// numbers of the first lie side by side.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tiled<const RANK: usize> {
    pub(crate) dtype: DType,
    pub(crate) start: DevicePtr,
    pub(crate) dims: [usize; RANK],
    /// Bytes from one index to the next, multiples of 16; that of the first dimension is not looked at.
    pub(crate) strides: [usize; RANK],
    /// At most 256 in each dimension, and 64 in the first.
    pub(crate) box_dims: [usize; RANK],
}

impl<const RANK: usize> Tiled<RANK> {
    /// The map; boxes lie in shared memory with 128-byte swizzle, and are zero beyond the tensor.
    ///
    /// # Errors
    /// The driver refuses an address, a size or a stride.
    pub(crate) fn encode(&self) -> Result<TensorMap> {
        self.encode_as(sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B)
    }

    /// The same, boxes as they are, row behind row.
    ///
    /// # Errors
    /// As for [`Tiled::encode`].
    pub(crate) fn encode_plain(&self) -> Result<TensorMap> {
        self.encode_as(sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE)
    }

    fn encode_as(&self, swizzle: sys::CUtensorMapSwizzle) -> Result<TensorMap> {
        use sys::CUtensorMapDataType::*;
        let dtype = match self.dtype {
            DType::BF16 => CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            DType::F16 => CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            other => return Err(Error::invalid("tensor map", format!("numbers of type {other}"))),
        };
        let dims = self.dims.map(|dim| dim as u64);
        let strides = self.strides.map(|stride| stride as u64);
        let box_dims = self.box_dims.map(|dim| dim as u32);
        let mut map = CUtensorMap { opaque: [0; 16] };
        // SAFETY: writes one map; every array has as many entries as the rank says, of strides one
        // fewer is read. The address is only noted: whoever launches with the map vouches for it.
        check("cuTensorMapEncodeTiled", unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                dtype,
                RANK as u32,
                self.start.0 as *mut c_void,
                dims.as_ptr(),
                strides[1..].as_ptr(),
                box_dims.as_ptr(),
                [1; RANK].as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        })?;
        Ok(TensorMap(map.opaque))
    }
}
