//! `aclnnMatmul` on two dimensions: out = self · mat2.

use std::ffi::c_void;
use std::sync::Arc;

use super::{Handle, Operator, Out, phase_one, phase_two, require, tensor};
use crate::acl::{ACLNN_INVALID, FLOAT, State, fail};

/// What phase one asks for; the real operator wants some too.
pub(super) const WORKSPACE: u64 = 512;

/// a `[m, k]` times b `[k, n]`, f32, k in order: a row's result is the same whatever stands beside it.
pub(super) fn product(a: &[f32], b: &[f32], m: usize, k: usize, n: usize) -> Vec<f32> {
    let mut out = vec![0.0f32; m * n];
    for i in 0..m {
        let row = &mut out[i * n..(i + 1) * n];
        for p in 0..k {
            let factor = a[i * k + p];
            for (sum, &value) in row.iter_mut().zip(&b[p * n..(p + 1) * n]) {
                *sum += factor * value;
            }
        }
    }
    out
}

/// `aclnnMatmulGetWorkspaceSize`.
///
/// An f32 `out` of bf16 or f16 operands is accepted, as the vendor's page does (the deduced type must
/// convert to out's), and holds the unrounded sums here. Whether a device rounds in between is not
/// documented.
///
/// # Safety
/// The result pointers are null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclnnMatmulGetWorkspaceSize(
    left: Handle,
    right: Handle,
    out: Handle,
    cube_math_type: i8,
    workspace: *mut u64,
    executor: *mut Handle,
) -> i32 {
    let results = Out { workspace, executor };
    phase_one("aclnnMatmul", results, |state| {
        let a = tensor(state, left, "self")?;
        let b = tensor(state, right, "mat2")?;
        let c = tensor(state, out, "out")?;
        require(a.is_float() && a.dtype == b.dtype, || {
            format!("self is of type {}, mat2 of type {}", a.dtype, b.dtype)
        })?;
        require(c.dtype == a.dtype || c.dtype == FLOAT, || {
            format!("out is of type {}, the operands of type {}", c.dtype, a.dtype)
        })?;
        require(cube_math_type == 0, || format!("cubeMathType {cube_math_type} is not modelled"))?;
        let shapes = || format!("{:?} times {:?} into {:?}", a.dims, b.dims, c.dims);
        let (&[m, k], &[k2, n]) = (a.dims.as_slice(), b.dims.as_slice()) else {
            return fail(ACLNN_INVALID, format!("{}: two dimensions are modelled", shapes()));
        };
        require(k == k2 && c.dims == [m, n], shapes)?;
        require(c.is_dense(), || "out has gaps".to_owned())?;
        let operator: Arc<Operator> = Arc::new(move |state: &State| {
            let sums = product(&a.load(state)?, &b.load(state)?, m, k, n);
            c.store(state, &sums)
        });
        Ok((WORKSPACE, operator))
    })
}

/// `aclnnMatmul`.
// SAFETY: the vendor's name, given to nothing else here.
#[unsafe(no_mangle)]
pub extern "C" fn aclnnMatmul(
    workspace: *mut c_void,
    bytes: u64,
    executor: Handle,
    stream: Handle,
) -> i32 {
    phase_two("aclnnMatmul", workspace, bytes, executor, stream)
}
