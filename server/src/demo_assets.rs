//! The demo model inside the binary: one small trained base and six adapters, so that the first
//! run needs no file and no network.

use amphora_model::ModelFiles;
use amphora_model::error::FileError;
use amphora_model::source::EmbeddedFile;

/// The name the demo's base model is served under.
pub const MODEL: &str = "amphora-demo";

/// An embedded file by its name in a folder.
macro_rules! file {
    ($folder:literal, $name:literal) => {
        ($name, include_bytes!(concat!("../../assets/demo-model/", $folder, $name)))
    };
}

const MODEL_FILES: &[EmbeddedFile] = &[
    file!("", "config.json"),
    file!("", "generation_config.json"),
    file!("", "model.safetensors"),
    file!("", "tokenizer.json"),
    file!("", "tokenizer_config.json"),
    file!("", "special_tokens_map.json"),
    file!("", "chat_template.jinja"),
];

/// An adapter's name and its files.
pub type EmbeddedAdapter = (&'static str, &'static [EmbeddedFile]);

macro_rules! adapter {
    ($name:literal, $folder:literal) => {
        (
            $name,
            &[file!($folder, "adapter_config.json"), file!($folder, "adapter_model.safetensors")],
        )
    };
}

/// The six adapters.
pub const ADAPTERS: &[EmbeddedAdapter] = &[
    adapter!("pirate", "adapters/pirate/"),
    adapter!("json", "adapters/json/"),
    adapter!("spanish", "adapters/spanish/"),
    adapter!("reverse", "adapters/reverse/"),
    adapter!("sql", "adapters/sql/"),
    adapter!("math", "adapters/math/"),
];

/// The base's files, as if they were a folder.
pub fn model() -> Result<ModelFiles, FileError> {
    ModelFiles::embedded("demo-model", MODEL_FILES)
}
