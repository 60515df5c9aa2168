//! A dense MLP: gate and up as one product, `silu(gate) · up`, down.

use amphora_hal::ops::{Activation, Swiglu};
use amphora_hal::{Backend, Ctx, Error, Result};

use super::{LayerRun, Projection};

/// One layer's MLP.
#[derive(Debug)]
pub(crate) struct DenseMlp<B: Backend> {
    /// `[2·intermediate, hidden]`: gate, then up.
    pub(crate) gate_up: Projection<B>,
    /// `[hidden, intermediate]`.
    pub(crate) down: Projection<B>,
    pub(crate) activation: Activation,
}

impl<B: Backend> DenseMlp<B> {
    /// `normed` → `branch`.
    pub(crate) fn run(&self, cx: &mut Ctx<'_, B>, run: &mut LayerRun<'_, B>) -> Result<()> {
        let LayerRun { step, deltas, .. } = run;
        let Some(dense) = &mut step.dense else {
            return Err(Error::invalid("mlp", "activations of a model without dense layers"));
        };
        let gate_up = deltas.as_ref().map(|d| d.of(|slices| &slices.gate_up));
        self.gate_up.run(cx, &step.normed, &mut dense.gate_up, gate_up)?;
        Swiglu { x: &dense.gate_up, activation: self.activation, out: &mut dense.inner }.run(cx)?;
        let down = deltas.as_ref().map(|d| d.of(|slices| &slices.down));
        self.down.run(cx, &dense.inner, &mut step.branch, down)
    }
}
