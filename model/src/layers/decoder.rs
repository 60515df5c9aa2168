//! A decoder whose layers norm before attention and before the MLP, and add both to one residual
//! stream. What differs between architectures is inside the layers; each architecture's file puts
//! them together.

use amphora_hal::ops::{Embed, GatherRows};
use amphora_hal::{Backend, Ctx, Mark, Result, Tensor};

use super::{Attention, Deltas, DenseMlp, LayerRun, Moe, Norm, Pending, Projection};
use crate::StepInputs;
use crate::lora_slices::LoraSlices;
use crate::observer::{Observer, Point};

/// The weights of a model.
#[derive(Debug)]
pub(crate) struct Decoder<B: Backend> {
    /// `[vocab, hidden]`.
    pub(crate) embedding: Tensor<B>,
    /// `[positions, head_dim]` f32.
    pub(crate) rope: Tensor<B>,
    pub(crate) layers: Vec<DecoderLayer<B>>,
    pub(crate) final_norm: Norm<B>,
    pub(crate) head: Projection<B>,
}

/// One layer.
#[derive(Debug)]
pub(crate) struct DecoderLayer<B: Backend> {
    pub(crate) input_norm: Norm<B>,
    pub(crate) attention: Attention<B>,
    pub(crate) post_norm: Norm<B>,
    pub(crate) mlp: Mlp<B>,
}

/// What follows attention.
#[derive(Debug)]
#[allow(clippy::large_enum_variant)] // There is one for each layer: a box would save nothing.
pub(crate) enum Mlp<B: Backend> {
    Dense(DenseMlp<B>),
    Experts(Moe<B>),
}

impl<B: Backend> Decoder<B> {
    /// Token ids of the step → logits `[logit_rows, vocab]` f32.
    pub(crate) fn forward<O: Observer<B>>(
        &self,
        cx: &mut Ctx<'_, B>,
        inputs: StepInputs<'_, B>,
        slices: &LoraSlices,
        observer: &mut O,
    ) -> Result<Tensor<B>> {
        let StepInputs { plan, tokens, kv, activations, lora } = inputs;
        let mut step = activations.bucket(&plan.host().bucket)?;
        Embed {
            index: plan.token_index(),
            table: tokens,
            weight: &self.embedding,
            out: &mut step.residual,
        }
        .run(cx)?;
        observer.tensor(cx, Point::Embedding, &step.residual)?;

        // A branch's output is added to the residual by the norm that follows.
        let pending = cx.in_layers(|cx| {
            let mut pending = None;
            for (index, (layer, slices)) in self.layers.iter().zip(slices.layers()).enumerate() {
                cx.device.mark(cx.stream, Mark::Layer(Some(index)));
                layer.input_norm.run(cx, &mut step, pending)?;
                if let Some(before) = index.checked_sub(1) {
                    observer.tensor(cx, Point::Residual(before), &step.residual)?;
                }
                let mut run = LayerRun {
                    layer: index,
                    plan,
                    step: &mut step,
                    deltas: lora.map(|table| Deltas { table, segments: plan.segments(), slices }),
                };
                let cache = kv.layer(index)?;
                layer.attention.run(cx, &mut run, &self.rope, cache)?;
                layer.post_norm.run(cx, run.step, Some(Pending))?;
                match &layer.mlp {
                    Mlp::Dense(mlp) => mlp.run(cx, &mut run)?,
                    Mlp::Experts(moe) => moe.run(cx, &mut run, observer)?,
                }
                pending = Some(Pending);
            }
            Ok(pending)
        })?;
        self.final_norm.run(cx, &mut step, pending)?;
        if let Some(last) = self.layers.len().checked_sub(1) {
            observer.tensor(cx, Point::Residual(last), &step.residual)?;
        }
        observer.tensor(cx, Point::FinalNorm, &step.normed)?;

        GatherRows { x: &step.normed, rows: plan.logit_row(), out: &mut step.gathered }.run(cx)?;
        self.head.run(cx, &step.gathered, &mut step.logits, None)?;
        Ok(step.logits)
    }
}
