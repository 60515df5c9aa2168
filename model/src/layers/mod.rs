//! The parts that architectures are put together from.

mod attention;
mod moe;
mod projection;

use amphora_hal::{Backend, PlanView};

use crate::activations::StepTensors;
use crate::lora_slices::LayerSlices;

pub(crate) use attention::{Attention, Heads};
pub(crate) use moe::Moe;
pub(crate) use projection::{Deltas, Projection};

/// What the parts of one layer work on in one step.
#[derive(Debug)]
pub(crate) struct LayerRun<'a, B: Backend> {
    pub(crate) layer: usize,
    pub(crate) plan: &'a PlanView<B>,
    pub(crate) step: &'a mut StepTensors<B>,
    /// `None`: no row has an adapter, and the base operators run.
    pub(crate) deltas: Option<Deltas<'a, B, LayerSlices>>,
}
