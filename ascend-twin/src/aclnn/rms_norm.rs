//! `aclnnRmsNorm`: y = x / sqrt(mean(x²) + eps) · gamma, and the reciprocal root itself.

use std::ffi::c_void;
use std::sync::Arc;

use super::{Handle, Operator, Out, phase_one, phase_two, require, tensor};
use crate::acl::{FLOAT, State};

/// `aclnnRmsNormGetWorkspaceSize`: gamma is f32 or of x's type, y of x's type, rstd f32.
///
/// # Safety
/// The result pointers are null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclnnRmsNormGetWorkspaceSize(
    x: Handle,
    gamma: Handle,
    epsilon: f64,
    y: Handle,
    rstd: Handle,
    workspace: *mut u64,
    executor: *mut Handle,
) -> i32 {
    let results = Out { workspace, executor };
    phase_one("aclnnRmsNorm", results, |state| {
        let x = tensor(state, x, "x")?;
        let gamma = tensor(state, gamma, "gamma")?;
        let y = tensor(state, y, "yOut")?;
        let rstd = tensor(state, rstd, "rstdOut")?;
        let types = x.is_float()
            && (gamma.dtype == x.dtype || gamma.dtype == FLOAT)
            && y.dtype == x.dtype
            && rstd.dtype == FLOAT;
        require(types, || {
            format!(
                "types: x {}, gamma {}, y {}, rstd {}",
                x.dtype, gamma.dtype, y.dtype, rstd.dtype
            )
        })?;
        let kept = x.dims.len().saturating_sub(gamma.dims.len());
        let mut reduced = x.dims.clone();
        reduced[kept..].fill(1);
        let shapes =
            kept > 0 && x.dims[kept..] == gamma.dims && y.dims == x.dims && rstd.dims == reduced;
        require(shapes, || {
            format!("x {:?}, gamma {:?}, y {:?}, rstd {:?}", x.dims, gamma.dims, y.dims, rstd.dims)
        })?;
        // Whether y may be x is not documented.
        require(!y.overlaps(&x) && !y.overlaps(&gamma), || "yOut overlaps an input".to_owned())?;
        let operator: Arc<Operator> = Arc::new(move |state: &State| {
            let (values, scale) = (x.load(state)?, gamma.load(state)?);
            let width = scale.len();
            let (mut out, mut roots) = (Vec::with_capacity(values.len()), Vec::new());
            for row in values.chunks_exact(width) {
                let square: f32 = row.iter().map(|v| v * v).sum();
                let root = 1.0 / (square / width as f32 + epsilon as f32).sqrt();
                roots.push(root);
                out.extend(row.iter().zip(&scale).map(|(v, g)| v * root * g));
            }
            rstd.store(state, &roots)?;
            y.store(state, &out)
        });
        Ok((0, operator))
    })
}

/// `aclnnRmsNorm`.
// SAFETY: the vendor's name, given to nothing else here.
#[unsafe(no_mangle)]
pub extern "C" fn aclnnRmsNorm(
    workspace: *mut c_void,
    bytes: u64,
    executor: Handle,
    stream: Handle,
) -> i32 {
    phase_two("aclnnRmsNorm", workspace, bytes, executor, stream)
}
