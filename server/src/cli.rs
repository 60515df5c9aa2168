//! The command line: flags and environment, read once, here.
//!
//! Every flag that a service would set has an environment variable, `AMPHORA_` and its name; a flag
//! goes before its variable.

mod tune;
mod values;

use std::path::PathBuf;

use amphora_hal::{DType, DeviceConfig};
use amphora_model::adapter::Orientation;
use amphora_model::synthetic::Spread;
use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::score::{BF16_TOLERANCE, F32_TOLERANCE, Rule};
pub use tune::TuneArgs;
pub use values::named_folder;
use values::{above_zero, at_least_one, at_most, bytes, from_one, thread_count, tolerance};

/// One base model and many LoRA adapters in one batch, on CPU, GPU or NPU.
#[derive(Debug, Parser)]
#[command(name = "amphora", version, about, arg_required_else_help = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Shows the embedded model answering through its six adapters in one batch, and checks the answers
    Demo(DemoArgs),
    /// Serves a model and its adapters over HTTP, in the shape of OpenAI's API
    Serve(ServeArgs),
    /// Answers one prompt on the command line
    Generate(GenerateArgs),
    /// Says what a model or adapter folder holds, what it needs, and whether it would be accepted
    Inspect(InspectArgs),
    /// Writes logits and greedy continuations of given tokens, or compares two such files
    Score(ScoreArgs),
    /// Measures a model under load, with adapters and without
    Bench(BenchArgs),
    /// Searches the kernels and sizes that run a model fastest on this GPU, and writes tuning data
    Tune(TuneArgs),
}

/// What the model computes on and in.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Device")]
pub struct DeviceArgs {
    /// Device to use: exactly this or none; without it the first that opens is taken
    #[arg(long, value_name = "NAME", env = "AMPHORA_BACKEND")]
    pub backend: Option<String>,
    /// Type of arithmetic and of stored activations
    #[arg(long, value_enum, default_value_t = Dtype::F32, env = "AMPHORA_DTYPE")]
    pub dtype: Dtype,
    /// Threads of a backend that computes on the host [default: one for each core]
    #[arg(long, value_name = "N", value_parser = thread_count, env = "AMPHORA_THREADS")]
    pub threads: Option<usize>,
    /// Folder of tuning data, which goes before what is built in for the GPU (cuda alone; `tune` writes it)
    #[arg(long, value_name = "DIR", env = "AMPHORA_TUNED_CONFIG_DIR")]
    pub tuned_config_dir: Option<PathBuf>,
}

impl DeviceArgs {
    /// How to open the device.
    pub fn config(&self) -> DeviceConfig {
        DeviceConfig {
            threads: self.threads,
            tuned: self.tuned_config_dir.clone(),
            ..DeviceConfig::default()
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Dtype {
    F32,
    Bf16,
}

/// Which model and which adapters.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Model")]
pub struct ModelArgs {
    /// Model folder in Hugging Face layout [default: the embedded demo model and its adapters]
    #[arg(long, value_name = "DIR", env = "AMPHORA_MODEL")]
    pub model: Option<PathBuf>,
    /// An adapter (a PEFT folder) and the name it is asked by; may be repeated
    #[arg(long = "adapter", value_name = "NAME=DIR", value_parser = named_folder)]
    pub adapters: Vec<NamedFolder>,
    /// Name of the base model in requests and replies [default: the folder's name]
    #[arg(long, value_name = "NAME", env = "AMPHORA_SERVED_MODEL_NAME")]
    pub served_model_name: Option<String>,
}

/// An adapter to load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedFolder {
    pub name: String,
    pub folder: PathBuf,
}

/// How adapters are read, where their files leave a choice.
#[derive(Debug, Clone, Copy, Default, Args)]
#[command(next_help_heading = "Adapters")]
pub struct AdapterArgs {
    /// How square fused expert parameters lie: lora_A over inputs (natural) or over outputs; used only
    /// where neither another tensor nor the version of PEFT tells
    #[arg(long, value_enum, value_name = "WAY", env = "AMPHORA_ADAPTER_ORIENTATION")]
    pub adapter_orientation: Option<AdapterOrientation>,
    /// Type that adapters are rounded to; they are stored in the type of arithmetic, which must hold it
    /// exactly [default: that type]
    #[arg(long, value_enum, value_name = "TYPE", env = "AMPHORA_ADAPTER_DTYPE")]
    pub adapter_dtype: Option<AdapterDtype>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum AdapterOrientation {
    Natural,
    Swapped,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum AdapterDtype {
    F32,
    Bf16,
    F16,
}

impl From<AdapterOrientation> for Orientation {
    fn from(orientation: AdapterOrientation) -> Self {
        match orientation {
            AdapterOrientation::Natural => Self::Natural,
            AdapterOrientation::Swapped => Self::Swapped,
        }
    }
}

impl From<AdapterDtype> for DType {
    fn from(dtype: AdapterDtype) -> Self {
        match dtype {
            AdapterDtype::F32 => Self::F32,
            AdapterDtype::Bf16 => Self::BF16,
            AdapterDtype::F16 => Self::F16,
        }
    }
}

/// How large the engine's batch and memories are.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Engine")]
pub struct EngineArgs {
    /// Most sequences in a step
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = at_least_one, env = "AMPHORA_MAX_SEQS")]
    pub max_seqs: usize,
    /// Most tokens in a step; longer prompts are computed in chunks
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = at_least_one, env = "AMPHORA_MAX_BATCH_TOKENS")]
    pub max_batch_tokens: usize,
    /// Most tokens of prompt and answer together [default: what the model was made for]
    #[arg(long, value_name = "N", value_parser = at_least_one, env = "AMPHORA_MAX_MODEL_LEN")]
    pub max_model_len: Option<usize>,
    /// Memory for keys and values of all sequences; more than all at full length is never taken
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = bytes, env = "AMPHORA_KV_MEMORY")]
    pub kv_memory: usize,
    /// Memory for adapters on the device
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = bytes, env = "AMPHORA_ADAPTER_MEMORY")]
    pub adapter_memory: usize,
    /// Memory for adapters on the host, ready to be brought to the device; beyond it their files are read
    /// again when they are asked for
    #[arg(long, value_name = "SIZE", default_value = "2GiB", value_parser = bytes, env = "AMPHORA_ADAPTER_HOST_MEMORY")]
    pub adapter_host_memory: usize,
    /// Compute every prompt whole, instead of keeping what prompts of one adapter begin with
    #[arg(long, env = "AMPHORA_NO_PREFIX_CACHE")]
    pub no_prefix_cache: bool,
    /// Highest rank of an adapter; a limit that reserves nothing
    #[arg(long, value_name = "RANK", default_value_t = 256, value_parser = at_least_one, env = "AMPHORA_MAX_LORA_RANK")]
    pub max_lora_rank: usize,
    /// Adapters on the device at a time [default: 16, or all that were given if they are more]
    #[arg(long, value_name = "N", value_parser = at_least_one, env = "AMPHORA_ADAPTER_SLOTS")]
    pub adapter_slots: Option<usize>,
    #[command(flatten)]
    pub reading: AdapterArgs,
    /// Serve the base alone, without any memory or code for adapters
    #[arg(long, conflicts_with = "adapters", env = "AMPHORA_NO_LORA")]
    pub no_lora: bool,
}

#[derive(Debug, Args)]
pub struct DemoArgs {
    #[command(flatten)]
    pub device: DeviceArgs,
}

#[derive(Debug, Args)]
pub struct ServeArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub device: DeviceArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Address to listen on
    #[arg(long, default_value = "127.0.0.1", env = "AMPHORA_HOST")]
    pub host: String,
    /// Port to listen on; 0 takes a free one and prints it
    #[arg(long, default_value_t = 8000, env = "AMPHORA_PORT")]
    pub port: u16,
    /// Let clients load adapters from inside this folder, and unload them, while it serves
    #[arg(long, value_name = "DIR", conflicts_with = "no_lora", env = "AMPHORA_ADAPTER_ROOT")]
    pub adapter_root: Option<PathBuf>,
    /// Most requests taken and not answered yet; one more is told to come again (429)
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = at_least_one, env = "AMPHORA_MAX_REQUESTS")]
    pub max_requests: usize,
}

#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// The prompt
    pub prompt: String,
    /// Give the prompt as it is, without the chat template
    #[arg(long)]
    pub raw: bool,
    /// Answer through this adapter: NAME of one of the demo's, or NAME=DIR
    #[arg(long, value_name = "NAME|NAME=DIR")]
    pub adapter: Option<String>,
    /// Model folder in Hugging Face layout [default: the embedded demo model and its adapters]
    #[arg(long, value_name = "DIR", env = "AMPHORA_MODEL")]
    pub model: Option<PathBuf>,
    #[command(flatten)]
    pub reading: AdapterArgs,
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Most tokens of the answer [default: what the model's files say, else what the context has room for]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub max_tokens: Option<usize>,
    /// Most tokens of prompt and answer together [default: what the model was made for]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub max_model_len: Option<usize>,
    /// 0 is greedy [default: what the model's files say, else 1]
    #[arg(long, value_name = "X")]
    pub temperature: Option<f32>,
    /// Share of the probability to draw from
    #[arg(long, value_name = "X")]
    pub top_p: Option<f32>,
    /// Tokens to draw from; 0 is all
    #[arg(long, value_name = "N")]
    pub top_k: Option<u32>,
    /// Makes the draws repeatable
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// A text that ends the answer; may be repeated
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
}

#[derive(Debug, Args)]
pub struct InspectArgs {
    /// A model folder, or an adapter's
    #[arg(value_name = "DIR")]
    pub folder: PathBuf,
    /// The model an adapter is for; its configuration is read, not its weights [default: none, and
    /// only what needs no model is checked]
    #[arg(long, value_name = "DIR", env = "AMPHORA_MODEL")]
    pub model: Option<PathBuf>,
    /// Write one JSON object
    #[arg(long)]
    pub json: bool,
    /// Highest rank of an adapter
    #[arg(long, value_name = "RANK", default_value_t = 256, value_parser = at_least_one, env = "AMPHORA_MAX_LORA_RANK")]
    pub max_lora_rank: usize,
    /// Memory for adapters on the device, which one that is held against its model must fit
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = bytes, env = "AMPHORA_ADAPTER_MEMORY")]
    pub adapter_memory: usize,
    #[command(flatten)]
    pub reading: AdapterArgs,
    #[command(flatten)]
    pub device: DeviceArgs,
}

#[derive(Debug, Args)]
pub struct ScoreArgs {
    /// Compare the scores in B with the reference in A, and fail past the tolerance
    #[arg(long, num_args = 2, value_names = ["A", "B"], conflicts_with_all = ["input", "output"])]
    pub compare: Option<Vec<PathBuf>>,
    /// f32: largest difference of a logit; bf16: largest median KL divergence [default: 2e-3; 1e-2]
    #[arg(long, value_name = "X", requires = "compare", value_parser = tolerance)]
    pub tolerance: Option<f64>,
    /// Lines of {"id", "adapter": null|NAME, "tokens": [...], "max_new_tokens": N}
    #[arg(
        long,
        value_name = "FILE.jsonl",
        required_unless_present = "compare",
        requires = "output"
    )]
    pub input: Option<PathBuf>,
    /// Where ID.logits, ID.greedy_ids and ID.greedy_logprobs go
    #[arg(long, value_name = "FILE.safetensors", requires = "input")]
    pub output: Option<PathBuf>,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub device: DeviceArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// Ranks above it belong to no class of any device.
const MOST_RANK: usize = 256;
/// Lengths of prompts that no run comes to the end of.
const MOST_CONTEXTS: usize = 1_000_000;

#[derive(Debug, Args)]
pub struct BenchArgs {
    /// Model folder, or a shape without files: synthetic:gpt-oss-20b, synthetic:qwen3-30b-a3b, synthetic:qwen3-32b, synthetic:tiny-moe, synthetic:tiny-qwen3-moe
    #[arg(long, value_name = "DIR|synthetic:NAME", env = "AMPHORA_MODEL")]
    pub model: String,
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Streams that run at once, one round for each number
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,8,32", value_parser = at_least_one)]
    pub streams: Vec<usize>,
    /// Tokens of each prompt
    #[arg(long, value_name = "N", default_value_t = 1600, value_parser = at_least_one)]
    pub prompt_tokens: usize,
    /// Tokens of each answer
    #[arg(long, value_name = "N", default_value_t = 600, value_parser = at_least_one)]
    pub new_tokens: usize,
    /// Random adapters on every projection; 0 measures the base alone
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub adapters: usize,
    /// Their rank
    #[arg(long, value_name = "RANK", default_value_t = 32, value_parser = from_one::<MOST_RANK>)]
    pub rank: usize,
    /// Most tokens in a step
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = at_least_one)]
    pub max_batch_tokens: usize,
    /// Bytes the device's memory gives, for the share of the limit: what an H200 was seen to read
    #[arg(long, value_name = "GB/s", default_value_t = 4640.0, value_parser = above_zero)]
    pub roof_gbps: f64,
    /// How the routers of a shape without files spread tokens over experts [default: balanced]
    #[arg(long, value_enum)]
    pub routing: Option<RoutingSpread>,
    /// Behind all rounds, the first token's time at so many lengths of prompt up to --prompt-tokens, with an
    /// adapter and without
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = at_most::<MOST_CONTEXTS>)]
    pub contexts: usize,
    /// After each round, a table of where a step's time goes, kernel by kernel
    #[arg(long)]
    pub profile: bool,
}

/// How routers spread tokens over experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RoutingSpread {
    /// Each expert as often as any other
    Balanced,
    /// By Zipf's law with exponent 1.1
    Zipf,
    /// Every token to the same experts
    One,
}

impl From<RoutingSpread> for Spread {
    fn from(spread: RoutingSpread) -> Self {
        match spread {
            RoutingSpread::Balanced => Spread::Balanced,
            RoutingSpread::Zipf => Spread::Zipf,
            RoutingSpread::One => Spread::One,
        }
    }
}

impl ScoreArgs {
    /// The rule of `--compare`.
    pub fn rule(&self) -> Rule {
        match self.device.dtype {
            Dtype::F32 => Rule::F32 { tolerance: self.tolerance.unwrap_or(F32_TOLERANCE) },
            Dtype::Bf16 => Rule::Bf16 { tolerance: self.tolerance.unwrap_or(BF16_TOLERANCE) },
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parse(line: &str) -> Result<Command, clap::Error> {
        Cli::try_parse_from(line.split_whitespace()).map(|cli| cli.command)
    }

    #[test]
    fn the_flags_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn adapters_are_names_and_folders() {
        let line = "amphora serve --model m --adapter a=x --adapter org/b=/y=z --port 0";
        let Ok(Command::Serve(serve)) = parse(line) else {
            panic!("a good line");
        };
        let named =
            |name: &str, folder: &str| NamedFolder { name: name.into(), folder: folder.into() };
        assert_eq!(serve.model.adapters, [named("a", "x"), named("org/b", "/y=z")]);
        assert!(parse("amphora serve --adapter a").is_err());
        assert!(parse("amphora serve --adapter =x").is_err());
    }

    #[test]
    fn score_scores_or_compares() {
        assert!(parse("amphora score --model m --input i --output o --adapter a=b").is_ok());
        assert!(parse("amphora score").is_err());
        assert!(parse("amphora score --input i").is_err());
        assert!(parse("amphora score --compare a").is_err());
        assert!(parse("amphora score --compare a b --input i --output o").is_err());
        let Ok(Command::Score(score)) = parse("amphora score --compare a b --dtype bf16") else {
            panic!("a good line");
        };
        assert_eq!(score.rule(), Rule::Bf16 { tolerance: BF16_TOLERANCE });
        let Ok(Command::Score(score)) = parse("amphora score --compare a b --tolerance 0.5") else {
            panic!("a good line");
        };
        assert_eq!(score.rule(), Rule::F32 { tolerance: 0.5 });
    }

    #[test]
    fn nonsense_is_a_usage_error() {
        for line in [
            "amphora",
            "amphora dance",
            "amphora serve --max-seqs 0",
            "amphora serve --dtype f8",
            "amphora serve --no-lora --adapter a=b",
            "amphora generate",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }
}
