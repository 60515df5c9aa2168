//! Models without files, for benchmarks: a well-known shape whose numbers are made when it is loaded.
//!
//! All tensors are windows into one pool of pseudo-random bf16 numbers, so a model of 40 GB takes the
//! host about one. Their magnitudes lie in [2^-6, 2^-5), which keeps activations of these widths
//! finite; nothing else is claimed of what such a model says, or of how its routers spread tokens: on
//! several streams that answer alike they choose few experts, and a step reads less than it would.
//!
//! Shapes are those of the models' published `config.json` files.

use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};

use amphora_hal::DType;

/// A shape: its name and its configuration.
struct Shape {
    name: &'static str,
    config: &'static str,
}

const SHAPES: [Shape; 4] = [
    Shape {
        name: "gpt-oss-20b",
        config: r#"{"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
            "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
            "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 201088,
            "sliding_window": 128, "swiglu_limit": 7.0, "rms_norm_eps": 1e-5, "rope_theta": 150000,
            "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0,
                "beta_slow": 1.0, "truncate": false, "original_max_position_embeddings": 4096},
            "max_position_embeddings": 131072, "attention_bias": true, "hidden_act": "silu",
            "eos_token_id": 200002, "tie_word_embeddings": false, "torch_dtype": "bfloat16"}"#,
    },
    Shape {
        name: "qwen3-30b-a3b",
        config: r#"{"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
            "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
            "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
            "num_experts_per_tok": 8, "norm_topk_prob": true, "decoder_sparse_step": 1,
            "mlp_only_layers": [], "vocab_size": 151936, "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0, "max_position_embeddings": 40960, "attention_bias": false,
            "hidden_act": "silu", "eos_token_id": 151645, "tie_word_embeddings": false,
            "torch_dtype": "bfloat16"}"#,
    },
    Shape {
        name: "qwen3-32b",
        config: r#"{"model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600,
            "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8,
            "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
            "max_position_embeddings": 40960, "attention_bias": false, "hidden_act": "silu",
            "eos_token_id": 151645, "tie_word_embeddings": false, "torch_dtype": "bfloat16"}"#,
    },
    // Small enough for any machine: to try a benchmark before it is taken to a large one.
    Shape {
        name: "tiny-moe",
        config: r#"{"model_type": "gpt_oss", "hidden_size": 128, "intermediate_size": 128,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 1024,
            "sliding_window": 128, "swiglu_limit": 7.0, "rms_norm_eps": 1e-5, "rope_theta": 150000,
            "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0,
                "beta_slow": 1.0, "truncate": false, "original_max_position_embeddings": 4096},
            "max_position_embeddings": 131072, "attention_bias": true, "hidden_act": "silu",
            "eos_token_id": 1, "tie_word_embeddings": false, "torch_dtype": "bfloat16"}"#,
    },
];

/// What stands before a shape's name where a model's folder is expected.
pub const PREFIX: &str = "synthetic:";

/// The names of the shapes.
pub fn names() -> impl Iterator<Item = &'static str> {
    SHAPES.iter().map(|shape| shape.name)
}

/// The configuration of a shape.
pub(crate) fn config(name: &str) -> Option<&'static str> {
    SHAPES.iter().find(|shape| shape.name == name).map(|shape| shape.config)
}

/// Pseudo-random bf16 numbers that tensors are cut from.
#[derive(Debug)]
pub(crate) struct Numbers {
    bytes: Vec<u8>,
}

impl Numbers {
    /// Enough for tensors of `elements` numbers, and some to let each begin at a place of its own.
    pub(crate) fn new(elements: usize) -> Self {
        /// Sign and mantissa; the exponent is that of 2^-6.
        const FREE: u64 = 0x807f_807f_807f_807f;
        const EXPONENT: u64 = 0x3c80_3c80_3c80_3c80;
        let mut bytes = vec![0; (2 * (elements + OFFSETS)).next_multiple_of(8)];
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        for word in bytes.chunks_exact_mut(8) {
            // Xorshift (Marsaglia 2003): fast, and plenty for numbers nobody reads.
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            word.copy_from_slice(&(state & FREE | EXPONENT).to_le_bytes());
        }
        Numbers { bytes }
    }

    /// The numbers of tensor `name`: a window that depends on the name alone.
    pub(crate) fn of(&self, name: &str, elements: usize) -> Option<(DType, &[u8])> {
        let hash = BuildHasherDefault::<DefaultHasher>::default().hash_one(name);
        let first = 2 * (hash as usize % OFFSETS);
        self.bytes.get(first..first + 2 * elements).map(|bytes| (DType::BF16, bytes))
    }
}

/// Places where a tensor may begin: a prime, so that no two rows of a layer fall together.
const OFFSETS: usize = 1_000_003;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Config, ModelFiles};

    #[test]
    fn every_shape_is_a_model() {
        for name in names() {
            let files = ModelFiles::synthetic(name).expect(name);
            let config = Config::read(&files).expect(name);
            assert!(config.layers() > 0, "{name}");
        }
        let error = ModelFiles::synthetic("gpt-9").expect_err("no such shape").to_string();
        assert!(error.contains("gpt-oss-20b"), "{error}");
    }

    #[test]
    fn numbers_are_small_finite_and_differ_by_name() {
        let numbers = Numbers::new(4096);
        let (dtype, bytes) = numbers.of("a", 4096).expect("there are so many");
        let values = amphora_hal::widen(dtype, bytes).expect("bf16");
        assert!(values.iter().all(|v| (2f32.powi(-6)..2f32.powi(-5)).contains(&v.abs())));
        let negative = values.iter().filter(|v| **v < 0.0).count();
        assert!((1600..2500).contains(&negative), "{negative}");
        assert_ne!(numbers.of("b", 4096), numbers.of("a", 4096));
        assert_eq!(numbers.of("a", 4096 + 2 * OFFSETS), None);
    }
}
