//! Flags of `tune`.

use std::path::PathBuf;

use clap::Args;

use super::values::from_one;

/// Adapters that a table can hold.
const MOST_ADAPTERS: usize = i16::MAX as usize;
/// Rows that no step needs more of.
const MOST_TOKENS: usize = 1 << 20;

#[derive(Debug, Args)]
pub struct TuneArgs {
    /// Model folder, or a shape without files: synthetic:gpt-oss-20b, synthetic:qwen3-30b-a3b, synthetic:qwen3-32b, synthetic:tiny-moe; shapes alone are read
    #[arg(long, value_name = "DIR|synthetic:NAME", env = "AMPHORA_MODEL")]
    pub model: String,
    /// Where the files go; those of earlier searches there are added to
    #[arg(long, value_name = "DIR", default_value = "tuned")]
    pub output: PathBuf,
    /// Seconds of searching; what they do not reach is said
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub budget: u64,
    /// Operators to search [default: all that are]
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    pub operators: Vec<String>,
    /// Adapters of rank 32 that rows use in turn
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = from_one::<MOST_ADAPTERS>)]
    pub adapters: usize,
    /// Most tokens in a step
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = from_one::<MOST_TOKENS>)]
    pub max_batch_tokens: usize,
}
