//! A way to look at activations while a model runs: tests compare them with stored ones.

use amphora_hal::ops::Routing;
use amphora_hal::{Backend, Ctx, Result, Tensor};

/// Where in the model a tensor is seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Point {
    /// The embedded tokens, `[tokens, hidden]`.
    Embedding,
    /// The residual stream after this layer, `[tokens, hidden]`.
    Residual(usize),
    /// The router's output in this layer, `[tokens, experts]` f32.
    RouterLogits(usize),
    /// The output of the final norm, `[tokens, hidden]`.
    FinalNorm,
}

/// Called at the named points, in stream order. What it puts on the stream runs there and then.
pub trait Observer<B: Backend> {
    /// A tensor at a point.
    ///
    /// # Errors
    /// The observer's own; it ends the step.
    fn tensor(&mut self, _cx: &mut Ctx<'_, B>, _point: Point, _tensor: &Tensor<B>) -> Result<()> {
        Ok(())
    }

    /// The choice of experts in a layer.
    ///
    /// # Errors
    /// The observer's own; it ends the step.
    fn routing(
        &mut self,
        _cx: &mut Ctx<'_, B>,
        _layer: usize,
        _routing: &Routing<B>,
    ) -> Result<()> {
        Ok(())
    }
}

/// Looks at nothing.
impl<B: Backend> Observer<B> for () {}
