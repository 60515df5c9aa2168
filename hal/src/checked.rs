//! `Checked<T>`, the proof that an operator keeps its contract, and the helpers its checks share.

use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::tensor::{Index, Tensor};

/// An operator whose `check` has passed. Only this crate makes one; a backend takes the operator
/// out with [`Checked::into_inner`] and may index on the strength of it.
#[derive(Debug)]
pub struct Checked<T>(T);

impl<T> Checked<T> {
    pub(crate) fn new(op: T) -> Self {
        Checked(op)
    }

    /// The operator.
    pub fn into_inner(self) -> T {
        self.0
    }
}

/// The rules that checks are made of. `op` is named in every error.
pub(crate) struct Check {
    op: &'static str,
}

impl Check {
    pub(crate) fn of(op: &'static str) -> Self {
        Check { op }
    }

    pub(crate) fn that(&self, holds: bool, what: impl FnOnce() -> String) -> Result<()> {
        if holds { Ok(()) } else { Err(Error::invalid(self.op, what())) }
    }

    /// The extents are exactly these; `name` as the operator's field.
    pub(crate) fn dims<D: Device>(&self, name: &str, t: &Tensor<D>, dims: &[usize]) -> Result<()> {
        self.that(t.dims() == dims, || format!("{name} is {}, expected {dims:?}", t.shape()))
    }

    pub(crate) fn ndim<D: Device>(&self, name: &str, t: &Tensor<D>, ndim: usize) -> Result<()> {
        self.that(t.dims().len() == ndim, || {
            format!("{name} is {}, expected {ndim} dimensions", t.shape())
        })
    }

    pub(crate) fn dtype<D: Device>(&self, name: &str, t: &Tensor<D>, dtype: DType) -> Result<()> {
        self.that(t.dtype() == dtype, || format!("{name} is {}, expected {dtype}", t.dtype()))
    }

    pub(crate) fn float<D: Device>(&self, name: &str, t: &Tensor<D>) -> Result<()> {
        self.that(t.dtype().is_float(), || {
            format!("{name} is {}, expected a floating-point type", t.dtype())
        })
    }

    /// No gap between elements.
    pub(crate) fn dense<D: Device>(&self, name: &str, t: &Tensor<D>) -> Result<()> {
        self.that(t.shape().is_dense(), || format!("{name} is {}, expected dense", t.shape()))
    }

    /// Rows at a constant pitch, dense inside.
    pub(crate) fn rows<D: Device>(&self, name: &str, t: &Tensor<D>) -> Result<()> {
        self.that(t.shape().as_rows().is_some(), || {
            format!("{name} is {}, expected dense rows at one pitch", t.shape())
        })
    }

    /// A dense f32 vector or table.
    pub(crate) fn f32_dense<D: Device>(
        &self,
        name: &str,
        t: &Tensor<D>,
        dims: &[usize],
    ) -> Result<()> {
        self.dtype(name, t, DType::F32)?;
        self.dims(name, t, dims)?;
        self.dense(name, t)
    }

    /// Every value may address one of `len` things.
    pub(crate) fn addresses<D: Device>(
        &self,
        name: &str,
        index: &Index<D>,
        len: usize,
    ) -> Result<()> {
        let values = index.values();
        self.that(values.start >= 0 && values.end <= len as isize, || {
            format!("{name} holds {values:?}, expected indices of {len}")
        })
    }

    /// The same, where −1 marks a row to be left alone.
    pub(crate) fn addresses_or_skips<D: Device>(
        &self,
        name: &str,
        index: &Index<D>,
        len: usize,
    ) -> Result<()> {
        let values = index.values();
        self.that(values.start >= -1 && values.end <= len as isize, || {
            format!("{name} holds {values:?}, expected −1 or indices of {len}")
        })
    }

    /// No output shares a byte with another operand.
    pub(crate) fn disjoint<D: Device>(
        &self,
        outputs: &[(&str, &Tensor<D>)],
        inputs: &[(&str, &Tensor<D>)],
    ) -> Result<()> {
        for (i, (name, out)) in outputs.iter().enumerate() {
            for (other_name, other) in outputs[i + 1..].iter().chain(inputs) {
                self.that(!out.overlaps(other), || format!("output {name} overlaps {other_name}"))?;
            }
        }
        Ok(())
    }
}
