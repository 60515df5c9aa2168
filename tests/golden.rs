//! The golden sets end to end on the CPU: base and every adapter, every prompt, through the real
//! engine, alone and as a mixed batch, in one chunk and in chunks of 1, 3 and 16 tokens.
#![cfg(feature = "cpu")]
#![allow(clippy::unwrap_used)]

use amphora_backend_cpu::Cpu;
use amphora_hal::DeviceConfig;
use amphora_tests::golden;
use amphora_tests::golden::hold::{
    BatchBits, hold_bf16, hold_f32, hold_forks, hold_logprobs, hold_mixed_batch, hold_preempted,
    hold_prefix_hits,
};

fn hold(model: &str) {
    hold_f32::<Cpu>(&DeviceConfig::default(), model, BatchBits::Same).unwrap();
}

#[test]
fn gpt_oss_f32_is_as_stored_however_batched() {
    hold("gpt_oss");
}

#[test]
fn gpt_oss_bf16_weights_in_f32_are_as_stored_however_batched() {
    hold("gpt_oss_bf16");
}

#[test]
fn gpt_oss_mxfp4_in_f32_is_as_stored_however_batched() {
    hold("gpt_oss_mxfp4");
}

#[test]
fn qwen3_moe_f32_is_as_stored_however_batched() {
    hold("qwen3_moe");
}

#[test]
fn qwen3_moe_sparse_f32_is_as_stored_however_batched() {
    hold("qwen3_moe_sparse");
}

#[test]
fn mixtral_f32_is_as_stored_however_batched() {
    hold("mixtral");
}

#[test]
fn llama_f32_is_as_stored_however_batched() {
    hold("llama");
}

#[test]
fn qwen3_f32_is_as_stored_however_batched() {
    hold("qwen3");
}

#[test]
fn answers_are_as_stored_after_preemption() {
    for model in golden::MODELS {
        hold_preempted::<Cpu>(&DeviceConfig::default(), model).unwrap();
    }
}

#[test]
fn answers_are_as_stored_after_a_prefix_hit() {
    for model in golden::MODELS {
        hold_prefix_hits::<Cpu>(&DeviceConfig::default(), model).unwrap();
    }
}

#[test]
fn several_answers_to_one_prompt_are_as_stored() {
    for model in golden::MODELS {
        hold_forks::<Cpu>(&DeviceConfig::default(), model).unwrap();
    }
}

#[test]
fn log_probabilities_are_those_of_the_stored_logits() {
    for model in golden::MODELS {
        hold_logprobs::<Cpu>(&DeviceConfig::default(), model).unwrap();
    }
}

#[test]
fn stored_mixed_batches_equal_their_own_goldens() {
    for model in golden::MODELS {
        hold_mixed_batch::<Cpu>(&DeviceConfig::default(), model).unwrap();
    }
}

#[test]
fn gpt_oss_bf16_in_bf16_keeps_the_bf16_rule() {
    hold_bf16::<Cpu>(&DeviceConfig::default(), "gpt_oss_bf16").unwrap();
}
