//! Models without files, for benchmarks: a well-known shape whose numbers are made when it is loaded.
//!
//! Nothing is claimed of what such a model says; how its routers spread tokens over experts is chosen
//! ([`Spread`]), and so is how many bytes a step reads.
//!
//! Shapes are those of the models' published `config.json` files.

mod adapter;
pub(crate) mod numbers;

pub use adapter::adapter;

/// A shape: its name and its configuration.
struct Shape {
    name: &'static str,
    config: &'static str,
}

const SHAPES: [Shape; 5] = [
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
    Shape {
        name: "tiny-qwen3-moe",
        config: r#"{"model_type": "qwen3_moe", "hidden_size": 128, "intermediate_size": 128,
            "moe_intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 32, "num_experts": 16, "num_experts_per_tok": 4,
            "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [],
            "vocab_size": 1024, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
            "max_position_embeddings": 40960, "attention_bias": false, "hidden_act": "silu",
            "eos_token_id": 1, "tie_word_embeddings": false, "torch_dtype": "bfloat16"}"#,
    },
];

/// How routers spread tokens over experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Spread {
    /// Each expert as often as any other.
    #[default]
    Balanced,
    /// By Zipf's law with exponent 1.1, in an order of its own in each layer; as near as scores with a
    /// normal spread come to it.
    Zipf,
    /// Every token to the same experts.
    One,
}

impl Spread {
    /// What an expert's score gets beside its random part, in standard deviations of that. `rank` counts
    /// experts from 0 on.
    ///
    /// Adding noise of Gumbel's law to `ln p` and taking the largest draws without replacement by `p`
    /// (Yellott 1977); the normal law with its deviation, `π/√6`, stands for it here.
    fn score(self, rank: usize) -> f32 {
        const EXPONENT: f32 = 1.1;
        const GUMBEL_DEVIATION: f32 = 1.2825;
        /// Beyond what any noise makes up for.
        const APART: f32 = 6.0;
        /// Ranks that no shape has so many experts of a token for.
        const BEHIND: usize = 16;
        match self {
            Spread::Balanced => 0.0,
            Spread::Zipf => -EXPONENT * ((rank + 1) as f32).ln() / GUMBEL_DEVIATION,
            Spread::One => -APART * rank.min(BEHIND) as f32,
        }
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Config, ModelFiles};

    #[test]
    fn every_shape_is_a_model() {
        for name in names() {
            let files = ModelFiles::synthetic(name, Spread::Balanced).expect(name);
            let config = Config::read(&files).expect(name);
            assert!(config.layers() > 0, "{name}");
        }
        let error = ModelFiles::synthetic("gpt-9", Spread::Balanced)
            .expect_err("no such shape")
            .to_string();
        assert!(error.contains("gpt-oss-20b"), "{error}");
    }
}
