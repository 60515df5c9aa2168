//! The operators. Each is a struct whose fields are its contract and whose `check` is its
//! validation: inputs by `&`, outputs by `&mut`, all memory the caller's. Types are the step's
//! compute type unless a field says otherwise; sums are f32 and rounded once.

mod attention;
mod dense;
mod elementwise;
mod logprobs;
mod moe;
mod rows;
mod sample;

pub use attention::{CopyBlocks, KvStore, KvWrite, Mask, PagedAttention};
pub use dense::{Linear, LoraLinear};
pub use elementwise::{RmsNorm, Rope, RopePairing, Swiglu};
pub use logprobs::{LOGPROB_WORDS, Logprobs};
pub use moe::{
    Activation, Combine, ExpertGroups, FusedMoe, FusedMoeLora, MoeRoute, MoeTile, RouteScore,
    Routing, RoutingShape, WeightOn,
};
pub use rows::{Embed, GatherRows, WriteTokens};
pub use sample::{RESULT_WORDS, Sample, split_mix64};

/// Gives an operator its `run`: check, then the backend's method of the same name.
macro_rules! runnable {
    ($op:ident, $method:ident) => {
        impl<D: crate::backend::Backend> $op<'_, D> {
            /// Checks the operator and puts it on the stream.
            ///
            /// # Errors
            /// As `check`, and the backend's own.
            pub fn run(self, cx: &mut crate::ctx::Ctx<'_, D>) -> crate::error::Result<()> {
                let op = self.check()?;
                let begin = crate::profile::Mark::Begin(crate::caps::OpKind::$op);
                cx.device.mark(cx.stream, begin);
                let put = cx.device.$method(cx.stream, op);
                cx.device.mark(cx.stream, crate::profile::Mark::End);
                put
            }
        }
    };
}
pub(crate) use runnable;
