//! Descriptors, and elements behind them as f32.

use std::ffi::c_void;

use half::{bf16, f16};

use super::Objects;
use crate::acl::{
    ACLNN_INVALID, BF16, FLOAT, FLOAT16, FORMAT_ND, Fail, Handle, INT64, State, enter, fail,
};

/// A view of device memory: extents and strides in elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tensor {
    pub(super) dims: Vec<usize>,
    pub(super) strides: Vec<usize>,
    pub(super) dtype: i32,
    /// Address of the first element.
    pub(super) address: usize,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Scalar {
    pub(super) value: f32,
}

fn size_of_type(dtype: i32) -> Option<usize> {
    match dtype {
        FLOAT => Some(4),
        FLOAT16 | BF16 => Some(2),
        INT64 => Some(8),
        _ => None,
    }
}

impl Tensor {
    pub(super) fn is_float(&self) -> bool {
        matches!(self.dtype, FLOAT | FLOAT16 | BF16)
    }

    pub(super) fn elements(&self) -> usize {
        self.dims.iter().product()
    }

    pub(super) fn is_dense(&self) -> bool {
        let mut stride = 1;
        self.dims.iter().zip(&self.strides).rev().all(|(&d, &s)| {
            let fits = d == 1 || s == stride;
            stride *= d;
            fits
        })
    }

    /// Bytes from the first element to one past the last.
    fn span(&self) -> usize {
        let last = self.dims.iter().zip(&self.strides);
        let last: usize = last.map(|(d, s)| d.saturating_sub(1) * s).sum();
        (1 + last) * self.size()
    }

    /// Whether the stretches of two tensors meet; gaps are not looked at.
    pub(super) fn overlaps(&self, other: &Tensor) -> bool {
        self.address < other.address + other.span() && other.address < self.address + self.span()
    }

    fn size(&self) -> usize {
        size_of_type(self.dtype).unwrap_or(1)
    }

    /// Byte addresses of all elements, in row-major order of the view.
    fn addresses(&self, state: &State) -> Result<Vec<usize>, String> {
        if self.elements() > 0 && !state.on_device(self.address, self.span()) {
            return Err(format!(
                "a tensor {:?} strides {:?} at {:#x} leaves its device allocation",
                self.dims, self.strides, self.address
            ));
        }
        let mut out = Vec::with_capacity(self.elements());
        let mut at = vec![0usize; self.dims.len()];
        for _ in 0..self.elements() {
            let element: usize = at.iter().zip(&self.strides).map(|(i, s)| i * s).sum();
            out.push(self.address + element * self.size());
            for (index, dim) in at.iter_mut().zip(&self.dims).rev() {
                *index += 1;
                if *index < *dim {
                    break;
                }
                *index = 0;
            }
        }
        Ok(out)
    }

    /// All elements, widened.
    pub(super) fn load(&self, state: &State) -> Result<Vec<f32>, String> {
        let addresses = self.addresses(state)?;
        let read = |at: usize| {
            // SAFETY: `addresses` held the whole span against a live allocation, and the lock is
            // held; no alignment is asked.
            unsafe {
                match self.dtype {
                    FLOAT => (at as *const f32).read_unaligned(),
                    FLOAT16 => (at as *const f16).read_unaligned().to_f32(),
                    _ => (at as *const bf16).read_unaligned().to_f32(),
                }
            }
        };
        Ok(addresses.into_iter().map(read).collect())
    }

    pub(super) fn load_i64(&self, state: &State) -> Result<Vec<i64>, String> {
        let addresses = self.addresses(state)?;
        // SAFETY: as in `load`.
        let read = |at: usize| unsafe { (at as *const i64).read_unaligned() };
        Ok(addresses.into_iter().map(read).collect())
    }

    /// Writes the first `values.len()` elements, each rounded once, to nearest and ties to even.
    pub(super) fn store(&self, state: &State, values: &[f32]) -> Result<(), String> {
        for (at, &value) in self.addresses(state)?.into_iter().zip(values) {
            // SAFETY: as in `load`; nothing else touches device memory while the lock is held.
            unsafe {
                match self.dtype {
                    FLOAT => (at as *mut f32).write_unaligned(value),
                    FLOAT16 => (at as *mut f16).write_unaligned(f16::from_f32(value)),
                    _ => (at as *mut bf16).write_unaligned(bf16::from_f32(value)),
                }
            }
        }
        Ok(())
    }
}

/// Extents or strides of a caller's array.
///
/// # Safety
/// `values` is null or valid for `count` reads.
unsafe fn array(values: *const i64, count: u64, name: &str) -> Result<Vec<usize>, Fail> {
    if values.is_null() || count == 0 || count > 8 {
        return fail(ACLNN_INVALID, format!("{name}: null, or not 1 to 8 values"));
    }
    // SAFETY: not null, and valid by this function's own contract.
    let values = unsafe { std::slice::from_raw_parts(values, count as usize) };
    values
        .iter()
        .map(|&v| usize::try_from(v).or_else(|_| fail(ACLNN_INVALID, format!("{name}: {v}"))))
        .collect()
}

fn as_pointer(code: i32, made: u64) -> Handle {
    if code == 0 { made as *mut c_void } else { std::ptr::null_mut() }
}

/// `aclCreateTensor`.
///
/// # Safety
/// The arrays are null or valid for their lengths.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclCreateTensor(
    view_dims: *const i64,
    view_dims_num: u64,
    dtype: i32,
    stride: *const i64,
    offset: i64,
    format: i32,
    storage_dims: *const i64,
    storage_dims_num: u64,
    data: *mut c_void,
) -> Handle {
    let mut made = 0;
    let code = enter("aclCreateTensor", |state| {
        // SAFETY: handed on to this function's caller.
        let (dims, strides, storage) = unsafe {
            (
                array(view_dims, view_dims_num, "viewDims")?,
                array(stride, view_dims_num, "stride")?,
                array(storage_dims, storage_dims_num, "storageDims")?,
            )
        };
        let (Some(size), Ok(offset)) = (size_of_type(dtype), usize::try_from(offset)) else {
            return fail(ACLNN_INVALID, format!("type {dtype}, offset {offset}"));
        };
        if format != FORMAT_ND {
            return fail(ACLNN_INVALID, format!("format {format} is not modelled"));
        }
        let last = dims.iter().zip(&strides).map(|(d, s)| d.saturating_sub(1) * s);
        let reach = offset + last.sum::<usize>();
        if !dims.contains(&0) && reach >= storage.iter().product() {
            return fail(
                ACLNN_INVALID,
                format!("the view {dims:?} strides {strides:?} leaves its storage {storage:?}"),
            );
        }
        let tensor = Tensor { dims, strides, dtype, address: data as usize + offset * size };
        made = state.handle();
        state.objects.tensors.insert(made, tensor);
        Ok(())
    });
    as_pointer(code, made)
}

/// `aclDestroyTensor`: not for members of a list, which the list takes with it.
// SAFETY: the vendor's name, given to nothing else here.
#[unsafe(no_mangle)]
pub extern "C" fn aclDestroyTensor(tensor: Handle) -> i32 {
    enter("aclDestroyTensor", |state| {
        let Objects { tensors, lists, .. } = &mut state.objects;
        let id = tensor as u64;
        if lists.values().any(|members| members.contains(&id)) {
            return fail(ACLNN_INVALID, "the tensor belongs to a list");
        }
        match tensors.remove(&id) {
            Some(_) => Ok(()),
            None => fail(ACLNN_INVALID, "no tensor, or destroyed before"),
        }
    })
}

/// `aclCreateTensorList`.
///
/// # Safety
/// `members` is null or valid for `count` reads.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclCreateTensorList(members: *const Handle, count: u64) -> Handle {
    let mut made = 0;
    let code = enter("aclCreateTensorList", |state| {
        if members.is_null() || count == 0 {
            return fail(ACLNN_INVALID, "no members");
        }
        // SAFETY: not null, and valid by this function's own contract.
        let members = unsafe { std::slice::from_raw_parts(members, count as usize) };
        let members: Vec<u64> = members.iter().map(|m| *m as u64).collect();
        if members.iter().any(|m| !state.objects.tensors.contains_key(m)) {
            return fail(ACLNN_INVALID, "a member is no tensor");
        }
        made = state.handle();
        state.objects.lists.insert(made, members);
        Ok(())
    });
    as_pointer(code, made)
}

/// `aclDestroyTensorList`: destroys the members too.
// SAFETY: the vendor's name, given to nothing else here.
#[unsafe(no_mangle)]
pub extern "C" fn aclDestroyTensorList(list: Handle) -> i32 {
    enter("aclDestroyTensorList", |state| match state.objects.lists.remove(&(list as u64)) {
        None => fail(ACLNN_INVALID, "no list, or destroyed before"),
        Some(members) => {
            for member in members {
                state.objects.tensors.remove(&member);
            }
            Ok(())
        }
    })
}

/// `aclCreateScalar`: f32 only.
///
/// # Safety
/// `value` is null or valid for a read of the type.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclCreateScalar(value: *mut c_void, dtype: i32) -> Handle {
    let mut made = 0;
    let code = enter("aclCreateScalar", |state| {
        if value.is_null() || dtype != FLOAT {
            return fail(ACLNN_INVALID, format!("type {dtype} is not modelled"));
        }
        // SAFETY: not null, and an f32 by this function's own contract.
        let value = unsafe { value.cast::<f32>().read_unaligned() };
        made = state.handle();
        state.objects.scalars.insert(made, Scalar { value });
        Ok(())
    });
    as_pointer(code, made)
}

/// `aclDestroyScalar`.
// SAFETY: the vendor's name, given to nothing else here.
#[unsafe(no_mangle)]
pub extern "C" fn aclDestroyScalar(scalar: Handle) -> i32 {
    enter("aclDestroyScalar", |state| match state.objects.scalars.remove(&(scalar as u64)) {
        Some(_) => Ok(()),
        None => fail(ACLNN_INVALID, "no scalar, or destroyed before"),
    })
}
