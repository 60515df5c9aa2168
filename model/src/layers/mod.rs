//! The parts that architectures are put together from.

pub(crate) mod assembly;
mod attention;
mod decoder;
pub(crate) mod description;
mod mlp;
mod moe;
mod norm;
mod projection;

use amphora_hal::{Backend, PlanView};

use crate::activations::StepTensors;
use crate::lora_slices::LayerSlices;

pub(crate) use attention::{Attention, HeadNorms, Heads};
pub(crate) use decoder::{Decoder, DecoderLayer, Mlp};
pub(crate) use mlp::DenseMlp;
pub(crate) use moe::Moe;
pub(crate) use norm::{Norm, Pending};
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
