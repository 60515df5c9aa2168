//! `aclnnInplaceAdd`: self += alpha · other; and `aclnnInplaceCopy`: self = src, over strides.

use std::ffi::c_void;
use std::sync::Arc;

use super::{Handle, Operator, Out, phase_one, phase_two, require, tensor};
use crate::acl::{ACLNN_NULLPTR, State, fail};

/// `aclnnInplaceAddGetWorkspaceSize`: equal types and shapes; broadcasting is not modelled.
///
/// # Safety
/// The result pointers are null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclnnInplaceAddGetWorkspaceSize(
    target: Handle,
    other: Handle,
    alpha: Handle,
    workspace: *mut u64,
    executor: *mut Handle,
) -> i32 {
    let results = Out { workspace, executor };
    phase_one("aclnnInplaceAdd", results, |state| {
        let target = tensor(state, target, "selfRef")?;
        let other = tensor(state, other, "other")?;
        let Some(alpha) = state.objects.scalars.get(&(alpha as u64)).copied() else {
            return fail(ACLNN_NULLPTR, "alpha is null or no scalar");
        };
        let fits = target.is_float() && target.dtype == other.dtype && target.dims == other.dims;
        require(fits, || {
            format!(
                "selfRef {:?} of type {}, other {:?} of type {}",
                target.dims, target.dtype, other.dims, other.dtype
            )
        })?;
        let operator: Arc<Operator> = Arc::new(move |state: &State| {
            let mut sums = target.load(state)?;
            for (sum, value) in sums.iter_mut().zip(other.load(state)?) {
                *sum += alpha.value * value;
            }
            target.store(state, &sums)
        });
        Ok((0, operator))
    })
}

/// `aclnnInplaceAdd`.
// SAFETY: the vendor's name, given to nothing else here.
#[unsafe(no_mangle)]
pub extern "C" fn aclnnInplaceAdd(
    workspace: *mut c_void,
    bytes: u64,
    executor: Handle,
    stream: Handle,
) -> i32 {
    phase_two("aclnnInplaceAdd", workspace, bytes, executor, stream)
}

/// `aclnnInplaceCopyGetWorkspaceSize`: equal shapes; a change of type is not modelled.
///
/// # Safety
/// The result pointers are null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclnnInplaceCopyGetWorkspaceSize(
    target: Handle,
    source: Handle,
    workspace: *mut u64,
    executor: *mut Handle,
) -> i32 {
    let results = Out { workspace, executor };
    phase_one("aclnnInplaceCopy", results, |state| {
        let target = tensor(state, target, "selfRef")?;
        let source = tensor(state, source, "src")?;
        let fits = target.is_float() && target.dtype == source.dtype && target.dims == source.dims;
        require(fits && !target.overlaps(&source), || {
            format!(
                "selfRef {:?} of type {}, src {:?} of type {}, or they overlap",
                target.dims, target.dtype, source.dims, source.dtype
            )
        })?;
        let operator: Arc<Operator> =
            Arc::new(move |state: &State| target.store(state, &source.load(state)?));
        Ok((0, operator))
    })
}

/// `aclnnInplaceCopy`.
// SAFETY: the vendor's name, given to nothing else here.
#[unsafe(no_mangle)]
pub extern "C" fn aclnnInplaceCopy(
    workspace: *mut c_void,
    bytes: u64,
    executor: Handle,
    stream: Handle,
) -> i32 {
    phase_two("aclnnInplaceCopy", workspace, bytes, executor, stream)
}
