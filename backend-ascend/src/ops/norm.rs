//! Root mean square norm by the vendor's operator: x in any compute type, gamma in f32, one rounding.

use amphora_hal::ops::RmsNorm;
use amphora_hal::{DType, Result};

use crate::Ascend;
use crate::aclnn::{Scratch, add, copy, rms_norm as norm, view};
use crate::driver::{Stream, View, data_type};

pub(super) fn rms_norm(stream: &mut Stream, op: RmsNorm<'_, Ascend>) -> Result<()> {
    if op.x.shape().elements() == 0 {
        return Ok(());
    }
    // A vector is one row: the operator wants a dimension that is not normed.
    let rows = |mut view: View| {
        if view.dims.len() == 1 {
            view.dims.insert(0, 1);
            view.strides.insert(0, view.dims[1]);
        }
        view
    };
    let (x, out) = (rows(view(op.x)), rows(view(op.out)));
    let mut scratch = Scratch::of(stream);
    let mut kept: Vec<usize> = x.dims.iter().map(|d| *d as usize).collect();
    let dense: Vec<usize> = kept.clone();
    if let Some(last) = kept.last_mut() {
        *last = 1;
    }
    let f32_bytes = size_of::<f32>();
    let roots = scratch.take(kept.iter().product::<usize>() * f32_bytes)?;
    let rstd = View::dense(roots, &kept, data_type(DType::F32));
    if let Some(residual) = op.add {
        add(stream, &scratch, &x, &rows(view(residual)))?;
    }
    let gamma = view(op.weight);
    if !op.out.is_same(op.x) {
        return norm(stream, &scratch, (&x, &gamma, op.eps), (&out, &rstd));
    }
    // Whether the operator may write over its input is not documented.
    let apart = scratch.take(op.x.bytes())?;
    let apart = View::dense(apart, &dense, x.dtype);
    norm(stream, &scratch, (&x, &gamma, op.eps), (&apart, &rstd))?;
    copy(stream, &scratch, &out, &apart)
}
