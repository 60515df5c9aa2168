//! Mixture-of-Experts models and PEFT adapters from Hugging Face folders, generic over the device.
//!
//! [`ModelFiles`] opens a folder, [`Config`] reads what it is, [`Model::load`] brings its weights to
//! a device, and [`Model::forward`] turns the tokens of a planned step into logits. `forward` allocates
//! nothing and asks the device nothing: it runs on [`Activations`] and a [`KvCache`] that were
//! reserved at start. [`adapter`] reads LoRA adapters of every layout that PEFT has written, and
//! [`adapter_image`] packs them for a device.
//!
//! What is absent: a backend's name, requests and adapters' names, and `unsafe` outside [`files`].
#![deny(unsafe_code)]

mod activations;
pub mod adapter;
pub mod adapter_image;
pub mod config;
pub mod error;
#[allow(unsafe_code)] // Maps base weights; see the module.
pub mod files;
mod gpt_oss;
mod json;
mod layers;
mod llama;
mod lora_slices;
mod mixtral;
mod observer;
mod qwen3;
mod qwen3_moe;
mod requirements;
mod rope;
mod safetensors_header;
pub mod source;
pub mod synthetic;
mod weights;

use amphora_hal::{Backend, Ctx, LoraTable, PlanView, Tensor, TokenTable};

pub use activations::{Activations, KvCache, KvShape, LayerCache, StepLimits};
pub use config::{Architecture, Config};
pub use error::{Error, Result};
pub use files::ModelFiles;
pub use lora_slices::{LayerSlices, LoraSlices};
pub use observer::{Observer, Point};
pub use requirements::{op_keys, supported_paths, workspace};
pub use rope::rope_table;
pub use weights::{Dequantised, LoadOptions, LoadReport, Progress};

use layers::{Decoder, description};
use weights::{Item, Request, Store};

/// A model on a device.
#[derive(Debug)]
pub struct Model<B: Backend> {
    config: Config,
    slices: LoraSlices,
    report: LoadReport,
    network: Decoder<B>,
}

/// What a model of this configuration needs on the device.
fn describe(files: &ModelFiles, config: &Config, options: &LoadOptions) -> Vec<Item> {
    match config.architecture {
        Architecture::GptOss => gpt_oss::describe(files, config, options),
        Architecture::Qwen3Moe => qwen3_moe::describe(config, options),
        Architecture::Mixtral => mixtral::describe(config, options),
        Architecture::Llama => llama::describe(config, options),
        Architecture::Qwen3 => qwen3::describe(config, options),
    }
}

/// The network made of it.
fn assemble<B: Backend>(store: &mut Store<B>, config: &Config) -> Result<Decoder<B>> {
    match config.architecture {
        Architecture::GptOss => gpt_oss::assemble(store, config),
        Architecture::Qwen3Moe => qwen3_moe::assemble(store, config),
        Architecture::Mixtral => mixtral::assemble(store, config),
        Architecture::Llama => llama::assemble(store, config),
        Architecture::Qwen3 => qwen3::assemble(store, config),
    }
}

/// The load of `items` for a model of this configuration.
fn request<'a>(
    files: &'a ModelFiles,
    config: &Config,
    items: &'a [Item],
    options: LoadOptions,
) -> Request<'a> {
    Request {
        files,
        items,
        options,
        architecture: config.architecture.name(),
        // Old exports keep the rotary frequencies, which are computed here.
        ignorable: |name| name.ends_with(".rotary_emb.inv_freq"),
        copy: description::tied_copy(config),
    }
}

/// What loading `files` would read and take on `device`, and everything that speaks against it. Nothing
/// is reserved, and no number is read.
pub fn examine<B: Backend>(
    files: &ModelFiles,
    config: &Config,
    options: LoadOptions,
    device: &B,
) -> (LoadReport, Vec<Error>) {
    let items = describe(files, config, &options);
    weights::examine(&request(files, config, &items, options), device)
}

/// What one step runs on. All of it was reserved at start.
#[derive(Debug)]
pub struct StepInputs<'a, B: Backend> {
    /// The step's plan, uploaded.
    pub plan: &'a PlanView<B>,
    /// Token ids; this step's prompt tokens have been written.
    pub tokens: &'a TokenTable<B>,
    /// Keys and values.
    pub kv: &'a mut KvCache<B>,
    /// Memory for activations.
    pub activations: &'a mut Activations<B>,
    /// Adapters; `None` runs the base operators, for steps in which no row has one.
    pub lora: Option<&'a LoraTable<B>>,
}

impl<B: Backend> Model<B> {
    /// Brings the weights of `files` to the device of `cx`, on its stream. All tensors are checked
    /// first, then their bytes are counted and reserved at once.
    ///
    /// # Errors
    /// A tensor is missing, surplus or of another shape or type than `config` says; the device has
    /// no room.
    pub fn load(
        files: &ModelFiles,
        config: Config,
        options: LoadOptions,
        cx: &mut Ctx<'_, B>,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<Self> {
        let items = describe(files, &config, &options);
        let request = request(files, &config, &items, options);
        let (mut store, report) = weights::load(&request, cx, progress)?;
        let network = assemble(&mut store, &config)?;
        Ok(Model { slices: LoraSlices::new(&config), report, network, config })
    }

    /// What the model is.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// What adapters can change.
    pub fn slices(&self) -> &LoraSlices {
        &self.slices
    }

    /// What was loaded.
    pub fn report(&self) -> &LoadReport {
        &self.report
    }

    /// Runs one step, from the token table to logits `[logit_rows, vocab]` f32, in the rows that the
    /// plan says. Keys and values of the step's tokens go into the cache.
    ///
    /// # Errors
    /// A plan larger than the activations, or the device's own.
    pub fn forward<O: Observer<B>>(
        &self,
        cx: &mut Ctx<'_, B>,
        inputs: StepInputs<'_, B>,
        observer: &mut O,
    ) -> amphora_hal::Result<Tensor<B>> {
        self.network.forward(cx, inputs, &self.slices, observer)
    }
}

#[cfg(test)]
mod tests;
