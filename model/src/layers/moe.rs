//! A mixture of experts: router, choice, and both projections of the chosen.

use amphora_hal::ops::{
    Activation, Combine, FusedMoe, FusedMoeLora, MoeRoute, RouteScore, WeightOn,
};
use amphora_hal::{Backend, Ctx, Error, Result, Tensor, Weight};

use super::{LayerRun, Projection};
use crate::observer::{Observer, Point};

/// One layer's experts.
#[derive(Debug)]
pub(crate) struct Moe<B: Backend> {
    pub(crate) router: Projection<B>,
    pub(crate) score: RouteScore,
    /// Whether the chosen weights are divided by their sum.
    pub(crate) renorm: bool,
    /// `[experts, 2·intermediate, hidden]`.
    pub(crate) gate_up: Weight<B>,
    /// `[experts, 2·intermediate]`.
    pub(crate) gate_up_bias: Option<Tensor<B>>,
    /// `[experts, hidden, intermediate]`.
    pub(crate) down: Weight<B>,
    /// `[experts, hidden]`.
    pub(crate) down_bias: Option<Tensor<B>>,
    pub(crate) activation: Activation,
}

impl<B: Backend> Moe<B> {
    /// `normed` → `branch`.
    pub(crate) fn run<O: Observer<B>>(
        &self,
        cx: &mut Ctx<'_, B>,
        run: &mut LayerRun<'_, B>,
        observer: &mut O,
    ) -> Result<()> {
        let LayerRun { layer, plan, step, deltas } = run;
        let layer = *layer;
        let Some(choice) = &mut step.experts else {
            return Err(Error::invalid("experts", "activations of a model without experts"));
        };
        let router_deltas = deltas.as_ref().map(|d| d.of(|slices| slices.router.as_slice()));
        self.router.run(cx, &step.normed, &mut choice.router_logits, router_deltas)?;
        observer.tensor(cx, Point::RouterLogits(layer), &choice.router_logits)?;

        MoeRoute {
            logits: &choice.router_logits,
            live: plan.kv_index(),
            slot: plan.slot(),
            score: self.score,
            correction: None,
            groups: None,
            renorm: self.renorm,
            scale: 1.0,
            routing: &mut choice.routing,
        }
        .run(cx)?;
        observer.routing(cx, layer, &choice.routing)?;

        let moe = FusedMoe {
            x: &step.normed,
            routing: &choice.routing,
            gate_up: &self.gate_up,
            gate_up_bias: self.gate_up_bias.as_ref(),
            down: &self.down,
            down_bias: self.down_bias.as_ref(),
            activation: self.activation,
            weight_on: WeightOn::Output,
            combine: Combine::Replace,
            out: &mut step.branch,
        };
        match deltas {
            None => moe.run(cx),
            Some(deltas) => FusedMoeLora {
                moe,
                lora: deltas.table,
                gate_up_slices: &deltas.slices.gate_up,
                down_slices: &deltas.slices.down,
            }
            .run(cx),
        }
    }
}
