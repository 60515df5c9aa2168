//! Rows by group, each group with its own matrix, by the vendor's grouped product. The experts will
//! stand on it; so far it serves to hold its call against the twin.

use amphora_hal::{DType, Error, Result, Tensor, Weight};

use crate::Ascend;
use crate::aclnn::{Scratch, address, view};
use crate::driver::{Executor, GroupedMatmul, Stream, View, data_type};
use crate::sys;

/// `out[r] = x[r] · W_gᵀ + bias_g` for the rows r of each group g: the first `counts[0]` rows are of
/// group 0, the next `counts[1]` of group 1, and so on. Rows behind the last group are left alone.
#[derive(Debug)]
pub struct GroupedProduct<'a> {
    /// `[rows, k]`, dense.
    pub x: &'a Tensor<Ascend>,
    /// `[groups, n, k]`, dense in x's type.
    pub weight: &'a Weight<Ascend>,
    /// `[groups, n]` f32; the vendor takes it so beside f32 and bf16 only.
    pub bias: Option<&'a Tensor<Ascend>>,
    /// `[groups]` 64-bit integers as bytes, whose sum is at most `rows`.
    pub counts: &'a Tensor<Ascend>,
    /// `[rows, n]`, dense, x's type, apart from the inputs.
    pub out: &'a mut Tensor<Ascend>,
}

impl GroupedProduct<'_> {
    fn check(&self) -> Result<()> {
        let (groups, n, k) = (self.weight.matrices(), self.weight.n(), self.weight.k());
        let rows = self.x.dims()[0];
        let dense = [self.x, self.counts, self.out].iter().all(|t| t.shape().is_dense());
        let apart = !self.out.overlaps(self.x)
            && !self.out.overlaps(self.weight.data())
            && !self.out.overlaps(self.counts);
        let bias = self.bias.is_none_or(|bias| {
            let types = bias.dtype() == DType::F32 && self.x.dtype() != DType::F16;
            types && bias.dims() == [groups, n] && bias.shape().is_dense()
        });
        let shapes = self.x.dims() == [rows, k]
            && self.out.dims() == [rows, n]
            && self.out.dtype() == self.x.dtype()
            && self.counts.bytes() == groups * size_of::<i64>();
        if dense && apart && bias && shapes && self.x.dtype().is_float() {
            return Ok(());
        }
        Err(Error::invalid(
            "grouped product",
            format!(
                "x {}, weight [{groups}, {n}, {k}], out {}, counts {}",
                self.x.shape(),
                self.out.shape(),
                self.counts.shape()
            ),
        ))
    }
}

pub(crate) fn grouped(stream: &mut Stream, op: &GroupedProduct<'_>) -> Result<()> {
    op.check()?;
    let (groups, n, k) = (op.weight.matrices(), op.weight.n(), op.weight.k());
    let dtype = data_type(op.x.dtype());
    let weight = View::dense(address(op.weight.data()), &[groups, n, k], dtype).transposed();
    let counts = View::dense(address(op.counts), &[groups], sys::ACL_INT64);
    let scratch = Scratch::of(stream);
    let bias = op.bias.map(view);
    let operands = GroupedMatmul {
        x: &view(op.x),
        weight: &weight,
        bias: bias.as_ref(),
        counts: &counts,
        out: &view(op.out),
    };
    Executor::run_grouped_matmul(&operands, stream, scratch.rest())
}
