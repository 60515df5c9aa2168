//! GPT-OSS: a decoder of alternating windowed and full attention with sinks, each layer followed by
//! a mixture of experts with a clamped, interleaved SwiGLU; biases everywhere, YaRN positions.

mod weights;

use amphora_hal::ops::{Embed, GatherRows, RmsNorm};
use amphora_hal::{Backend, Ctx, Result, Tensor};

use crate::StepInputs;
use crate::activations::StepTensors;
use crate::layers::{Attention, Deltas, LayerRun, Moe, Projection};
use crate::lora_slices::LoraSlices;
use crate::observer::{Observer, Point};

pub(crate) use weights::load;

/// The weights of a model.
#[derive(Debug)]
pub(crate) struct GptOss<B: Backend> {
    /// `[vocab, hidden]`.
    embedding: Tensor<B>,
    /// `[positions, head_dim]` f32.
    rope: Tensor<B>,
    layers: Vec<Layer<B>>,
    final_norm: Norm<B>,
    head: Projection<B>,
}

#[derive(Debug)]
struct Layer<B: Backend> {
    input_norm: Norm<B>,
    attention: Attention<B>,
    post_norm: Norm<B>,
    moe: Moe<B>,
}

/// `[hidden]` f32.
#[derive(Debug)]
struct Norm<B: Backend> {
    weight: Tensor<B>,
    eps: f32,
}

impl<B: Backend> GptOss<B> {
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
        let mut pending = None;
        for (index, (layer, slices)) in self.layers.iter().zip(slices.layers()).enumerate() {
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
            layer.moe.run(cx, &mut run, observer)?;
            pending = Some(Pending);
        }
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

/// Says that `branch` holds what is still to be added to the residual.
#[derive(Debug, Clone, Copy)]
struct Pending;

impl<B: Backend> Norm<B> {
    /// `residual += branch` if it is pending, then `normed = norm(residual)`.
    fn run(
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
}
