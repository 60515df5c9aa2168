//! The root mean square norm, over the residual stream and over the heads of a projection.

use amphora_hal::ops::RmsNorm;
use amphora_hal::{Backend, Ctx, Result, Tensor};

use crate::activations::StepTensors;

/// `[width]` f32.
#[derive(Debug)]
pub(crate) struct Norm<B: Backend> {
    pub(crate) weight: Tensor<B>,
    pub(crate) eps: f32,
}

/// Says that `branch` holds what is still to be added to the residual.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pending;

impl<B: Backend> Norm<B> {
    /// `residual += branch` if it is pending, then `normed = norm(residual)`.
    pub(crate) fn run(
        &self,
        cx: &mut Ctx<'_, B>,
        step: &mut StepTensors<B>,
        pending: Option<Pending>,
    ) -> Result<()> {
        RmsNorm {
            x: &mut step.residual,
            add: pending.map(|Pending| &step.branch),
            weight: &self.weight,
            eps: self.eps,
            out: &mut step.normed,
        }
        .run(cx)
    }

    /// Each head of `[tokens, heads, width]` by itself, in place.
    pub(crate) fn heads(&self, cx: &mut Ctx<'_, B>, heads: &mut Tensor<B>) -> Result<()> {
        let mut out = heads.clone();
        RmsNorm { x: heads, add: None, weight: &self.weight, eps: self.eps, out: &mut out }.run(cx)
    }
}
