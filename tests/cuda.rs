//! Whole models on a CUDA GPU: the golden sets, the promises of a step, and one captured graph across an
//! adapter swap. Needs a GPU; a machine without one says NOT RUN.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used)]

use amphora_backend_cuda::Cuda;
use amphora_engine::EngineConfig;
use amphora_hal::{DType, Device, DeviceConfig};
use amphora_tests::golden;
use amphora_tests::golden::hold::{
    BatchBits, hold_bf16, hold_f32, hold_forks, hold_logprobs, hold_mixed_batch, hold_preempted,
    hold_prefix_hits,
};
use amphora_tests::promises::{
    Contexts, ExpertLaunches, Launches, a_profiled_step_answers_alike, a_step_crosses_once,
    experts_take_few_launches, nothing_is_made_after_ready,
};
use amphora_tests::serving;

/// The device, or `None` after a word to whoever reads the log.
fn device() -> Option<Cuda> {
    match Cuda::open(&DeviceConfig::default()) {
        Ok(device) => Some(device),
        Err(error) => {
            println!("NOT RUN: {error}");
            None
        }
    }
}

#[test]
fn golden_sets_are_as_stored_however_batched() {
    if device().is_none() {
        return;
    }
    for model in ["gpt_oss", "gpt_oss_bf16", "gpt_oss_mxfp4"] {
        hold_f32::<Cuda>(&DeviceConfig::default(), model, BatchBits::Near).unwrap();
        hold_mixed_batch::<Cuda>(&DeviceConfig::default(), model).unwrap();
    }
}

#[test]
fn golden_sets_of_the_other_families_are_as_stored_however_batched() {
    if device().is_none() {
        return;
    }
    for model in ["qwen3_moe", "qwen3_moe_sparse", "mixtral", "llama", "qwen3"] {
        hold_f32::<Cuda>(&DeviceConfig::default(), model, BatchBits::Near).unwrap();
        hold_mixed_batch::<Cuda>(&DeviceConfig::default(), model).unwrap();
    }
}

/// Blocks that are taken away, found again, shared and copied, and log-probabilities behind a replayed step.
#[test]
fn golden_sets_are_as_stored_whatever_happens_to_their_blocks() {
    if device().is_none() {
        return;
    }
    for model in ["gpt_oss", "qwen3_moe"] {
        hold_preempted::<Cuda>(&DeviceConfig::default(), model).unwrap();
        hold_prefix_hits::<Cuda>(&DeviceConfig::default(), model).unwrap();
        hold_forks::<Cuda>(&DeviceConfig::default(), model).unwrap();
        hold_logprobs::<Cuda>(&DeviceConfig::default(), model).unwrap();
    }
}

#[test]
fn gpt_oss_bf16_in_bf16_keeps_the_bf16_rule() {
    if device().is_some() {
        hold_bf16::<Cuda>(&DeviceConfig::default(), "gpt_oss_bf16").unwrap();
    }
}

#[test]
fn a_step_is_one_upload_one_graph_and_one_download() {
    if let Some(device) = device() {
        a_step_crosses_once(device, Launches::Replay);
    }
}

#[test]
fn profiled_steps_answer_alike() {
    if let Some(device) = device() {
        a_profiled_step_answers_alike(device);
    }
}

/// Gate and up, down, and the sum of a token's experts. Of many tokens one in front, which lays them out for tensor
/// maps, and both products in one where experts have at most 100 tokens, as here; with adapters each by itself
/// again, behind one for its first factors.
#[test]
fn a_layer_of_experts_takes_few_launches() {
    if let Some(device) = device() {
        let most = ExpertLaunches { decode: 3, prompt: 3, prompt_with_adapters: 6 };
        experts_take_few_launches(device, DType::BF16, most);
    }
}

/// In a process of its own, because the folder of compiled kernels is the environment's to name.
#[test]
fn from_a_cold_cache_nothing_is_made_after_ready() {
    if device().is_none() {
        return;
    }
    let folder = std::env::temp_dir().join(format!("amphora-cold-{}", std::process::id()));
    let ended = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_cold_start", "--ignored", "--nocapture"])
        .env("AMPHORA_KERNEL_CACHE", &folder)
        .output()
        .unwrap();
    let _ = std::fs::remove_dir_all(&folder);
    let out = String::from_utf8_lossy(&ended.stdout);
    let error = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success() && out.contains("1 passed"), "{out}\n{error}");
}

#[test]
#[ignore = "compiles every kernel; from_a_cold_cache_nothing_is_made_after_ready runs it"]
fn a_cold_start() {
    let Some(device) = device() else { return };
    let opened = device.counters();
    assert!(opened.compilations > 0 && opened.modules >= opened.compilations, "{opened:?}");
    let contexts = Contexts { count: 200, longest: 2048 };
    nothing_is_made_after_ready(device, DType::BF16, contexts);
}

/// A device that holds no step.
#[test]
fn a_start_without_room_tells_its_budget() {
    if device().is_none() {
        return;
    }
    let config = DeviceConfig { memory_limit: Some(1 << 20), ..DeviceConfig::default() };
    let settings = EngineConfig::default();
    let model = golden::folder().join("models").join("gpt_oss");
    let error = serving::start(Cuda::open(&config).unwrap(), &model, DType::F32, &settings)
        .expect_err("one MiB holds no step")
        .to_string();
    assert!(error.starts_with("out of memory in pool"), "{error}");
    for part in ["weights ", "adapters ", "KV cache ", "scratch ", "that may be used"] {
        assert!(error.contains(part), "{part} in {error}");
    }
}

#[test]
fn a_captured_graph_takes_the_adapter_that_its_slot_holds_now() {
    if let Some(device) = device() {
        amphora_tests::swap::one_graph_across_a_swap(&device);
    }
}
