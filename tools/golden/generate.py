#!/usr/bin/env python3
"""Generate the golden reference sets of the end-to-end tests.

Everything that a runtime has to reproduce is computed by Hugging Face transformers and PEFT (eager attention,
eager experts, float32 arithmetic).  An independent numpy implementation of the LoRA update (function
`numpy_merge`) is applied to the stored checkpoint tensors and must give the same logits: that pins the meaning
of every adapter file.

  python generate.py --out DIR                          the public set (default seed, default dims)
  python generate.py --out DIR --seed 7 --params P.json another set: P.json overrides dims / ranks / prompt lengths
  python generate.py --out DIR --only qwen3_moe,llama   only some models (the manifest is rebuilt from disk)
  python generate.py --out DIR --verify                 reload everything from disk and compare (no writing)
crosscheck.py compares a finished set with other transformers / PEFT versions.
See README.md for formats and tolerances.
"""
import argparse, copy, hashlib, json, math, os, re, shutil, sys, tempfile, warnings
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
import transformers, peft
from transformers import AutoConfig, AutoModelForCausalLM
from peft import LoraConfig, PeftModel, get_peft_model

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
warnings.filterwarnings("ignore")
torch.manual_seed(0)
torch.set_grad_enabled(False)
V5 = int(transformers.__version__.split(".")[0]) >= 5

# --------------------------------------------------------------------------------------------------------------
# Parameters of the set.  A --params file may override any of them (dict merge, see README.md).
# --------------------------------------------------------------------------------------------------------------
DEFAULTS = {
    "tokenizer": {"vocab_size": 400},
    "prompt_lengths": [1, 7, 33, 70],
    "long_tail": 16,              # adapters: logits of the longest prompt are stored for the last N positions only
    "greedy_tokens": 24,
    "hidden_for": "all",          # "all" or "base": which runs store per-layer hidden states and routing
    "ranks": {"attn": 8, "experts": 4, "big": 20, "pattern": [12, 5], "per_expert": 4,
              "big_dtype": "float32"},
    "models": {
        "gpt_oss": dict(vocab=400, hidden=64, layers=3, heads=8, kv=2, head_dim=16, inter=48, experts=8, topk=2,
                        window=16, swiglu_limit=1.25, yarn_factor=8.0, yarn_orig=32),
        "gpt_oss_bf16": dict(vocab=400, hidden=64, layers=2, heads=8, kv=2, head_dim=16, inter=32, experts=8, topk=2,
                             window=16, swiglu_limit=7.0, yarn_factor=32.0, yarn_orig=16),
        "gpt_oss_mxfp4": dict(vocab=400, hidden=64, layers=2, heads=8, kv=2, head_dim=16, inter=64, experts=8, topk=4,
                              window=16, swiglu_limit=7.0, yarn_factor=32.0, yarn_orig=16),
        "qwen3_moe": dict(vocab=400, hidden=48, layers=3, heads=6, kv=2, head_dim=16, inter=64, moe_inter=24,
                          experts=8, topk=2, norm_topk=True, sparse_step=1, mlp_only=[], tie=False),
        "qwen3_moe_sparse": dict(vocab=400, hidden=48, layers=4, heads=6, kv=2, head_dim=16, inter=64, moe_inter=24,
                                 experts=8, topk=3, norm_topk=False, sparse_step=2, mlp_only=[1], tie=True),
        "mixtral": dict(vocab=400, hidden=64, layers=2, heads=4, kv=2, inter=48, experts=6, topk=2),
        "deepseek_v2_lite": dict(vocab=400, hidden=48, layers=3, heads=3, q_lora=None, kv_lora=24, nope=16, rope=8,
                                 v=16, inter=64, moe_inter=20, experts=6, topk=2, shared=2, first_dense=1,
                                 topk_method="greedy", n_group=1, topk_group=1, scaling=1.0, yarn_factor=4.0,
                                 yarn_orig=32, mscale=0.707),
        "deepseek_v2": dict(vocab=400, hidden=64, layers=3, heads=4, q_lora=32, kv_lora=32, nope=16, rope=8, v=24,
                            inter=64, moe_inter=24, experts=8, topk=3, shared=1, first_dense=1,
                            topk_method="group_limited_greedy", n_group=4, topk_group=2, scaling=16.0,
                            yarn_factor=4.0, yarn_orig=32, mscale=1.0),
        "deepseek_v3": dict(vocab=400, hidden=64, layers=3, heads=4, q_lora=32, kv_lora=32, nope=16, rope=8, v=24,
                            inter=64, moe_inter=24, experts=8, topk=3, shared=1, first_dense=1, n_group=4,
                            topk_group=2, scaling=2.5, yarn_factor=4.0, yarn_orig=32, mscale=1.0),
        "llama4_text": dict(vocab=400, hidden=48, layers=4, heads=6, kv=2, head_dim=8, inter=32, inter_mlp=64,
                            experts=4, topk=1, moe_step=2, chunk=16, floor_scale=8, nope_interval=4),
        "llama4_mm": dict(vocab=400, hidden=40, layers=3, heads=5, kv=1, head_dim=8, inter=24, inter_mlp=64,
                          experts=4, topk=1, moe_step=1, chunk=16, floor_scale=8, nope_interval=3),
        "llama": dict(vocab=400, hidden=64, layers=3, heads=4, kv=2, inter=96, tie=True),
        "qwen3": dict(vocab=416, hidden=48, layers=3, heads=4, kv=1, head_dim=16, inter=80, tie=False),
    },
}
FAMILY = {"gpt_oss_bf16": "gpt_oss", "gpt_oss_mxfp4": "gpt_oss", "qwen3_moe_sparse": "qwen3_moe",
          "deepseek_v2_lite": "deepseek_v2", "llama4_mm": "llama4_text"}
STORE_DTYPE = {"gpt_oss_bf16": torch.bfloat16, "gpt_oss_mxfp4": torch.bfloat16}
CONFIG_STYLE = {"gpt_oss_bf16": "v5"}       # config.json exactly as transformers 5 writes it; else hub (v4) style
SHARDED = {"qwen3": 3, "mixtral": 2, "deepseek_v3": 2}   # -> model-0000i-of-0000N.safetensors + index.json


def family_of(name):
    return FAMILY.get(name, name)


# --------------------------------------------------------------------------------------------------------------
# config.json in the style of the hub checkpoints
# --------------------------------------------------------------------------------------------------------------
def hub_config(name, p, tok):
    f = family_of(name)
    dt = "bfloat16" if STORE_DTYPE.get(name) == torch.bfloat16 else "float32"
    base = {"hidden_size": p["hidden"], "num_hidden_layers": p["layers"], "num_attention_heads": p["heads"],
            "vocab_size": p["vocab"], "torch_dtype": dt, "use_cache": True, "attention_dropout": 0.0,
            "initializer_range": 0.02, "hidden_act": "silu", "max_position_embeddings": 256,
            "bos_token_id": tok["bos"], "eos_token_id": tok["eos"], "tie_word_embeddings": bool(p.get("tie", False)),
            "transformers_version": "4.55.0"}
    if f == "gpt_oss":
        base.pop("bos_token_id")
        base.update({
            "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True,
            "head_dim": p["head_dim"], "num_key_value_heads": p["kv"], "intermediate_size": p["inter"],
            "num_local_experts": p["experts"], "num_experts_per_tok": p["topk"], "experts_per_token": p["topk"],
            "sliding_window": p["window"], "swiglu_limit": p["swiglu_limit"], "rms_norm_eps": 1e-5,
            "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(p["layers"])],
            "initial_context_length": p["yarn_orig"], "pad_token_id": tok["pad"], "rope_theta": 150000,
            "output_router_logits": False, "router_aux_loss_coef": 0.9,
            "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": p["yarn_factor"],
                             "original_max_position_embeddings": p["yarn_orig"], "rope_type": "yarn",
                             "truncate": False}})
        if name == "gpt_oss_mxfp4":
            base["quantization_config"] = {
                "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                           "model.embed_tokens", "lm_head"], "quant_method": "mxfp4"}
    elif f == "qwen3_moe":
        base.update({
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False,
            "head_dim": p["head_dim"], "num_key_value_heads": p["kv"], "intermediate_size": p["inter"],
            "moe_intermediate_size": p["moe_inter"], "num_experts": p["experts"], "num_experts_per_tok": p["topk"],
            "norm_topk_prob": p["norm_topk"], "decoder_sparse_step": p["sparse_step"],
            "mlp_only_layers": p["mlp_only"], "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "rope_scaling": None,
            "sliding_window": None, "use_sliding_window": False, "max_window_layers": p["layers"],
            "output_router_logits": False, "router_aux_loss_coef": 0.001})
    elif f == "mixtral":
        base.update({
            "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_key_value_heads": p["kv"],
            "intermediate_size": p["inter"], "num_local_experts": p["experts"], "num_experts_per_tok": p["topk"],
            "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "sliding_window": None, "output_router_logits": False,
            "router_aux_loss_coef": 0.02})
        if p.get("head_dim"):
            base["head_dim"] = p["head_dim"]
    elif f in ("deepseek_v2", "deepseek_v3"):
        v3 = f == "deepseek_v3"
        base.update({
            "architectures": ["DeepseekV3ForCausalLM" if v3 else "DeepseekV2ForCausalLM"], "model_type": f,
            "attention_bias": False, "num_key_value_heads": p["heads"], "q_lora_rank": p["q_lora"],
            "kv_lora_rank": p["kv_lora"], "qk_nope_head_dim": p["nope"], "qk_rope_head_dim": p["rope"],
            "v_head_dim": p["v"], "intermediate_size": p["inter"], "moe_intermediate_size": p["moe_inter"],
            "n_routed_experts": p["experts"], "num_experts_per_tok": p["topk"], "n_shared_experts": p["shared"],
            "first_k_dense_replace": p["first_dense"], "moe_layer_freq": 1, "ep_size": 1, "pretraining_tp": 1,
            "n_group": p["n_group"], "topk_group": p["topk_group"], "routed_scaling_factor": p["scaling"],
            "topk_method": "noaux_tc" if v3 else p["topk_method"],
            "scoring_func": "sigmoid" if v3 else "softmax", "norm_topk_prob": v3, "rms_norm_eps": 1e-6,
            "rope_theta": 10000, "aux_loss_alpha": 0.001, "seq_aux": True,
            "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": p["yarn_factor"], "mscale": p["mscale"],
                             "mscale_all_dim": p["mscale"], "original_max_position_embeddings": p["yarn_orig"],
                             "type": "yarn"}})
        if v3:
            base["num_nextn_predict_layers"] = 1
    elif f == "llama4_text":
        base.update({
            "architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", "attention_bias": False,
            "head_dim": p["head_dim"], "num_key_value_heads": p["kv"], "intermediate_size": p["inter"],
            "intermediate_size_mlp": p["inter_mlp"], "num_local_experts": p["experts"],
            "num_experts_per_tok": p["topk"], "interleave_moe_layer_step": p["moe_step"],
            "attention_chunk_size": p["chunk"], "attn_temperature_tuning": True, "floor_scale": p["floor_scale"],
            "attn_scale": 0.1, "for_llm_compression": False, "use_qk_norm": True, "rms_norm_eps": 1e-5,
            "no_rope_layers": [int((i + 1) % p["nope_interval"] != 0) for i in range(p["layers"])],
            "no_rope_layer_interval": p["nope_interval"], "output_router_logits": False,
            "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "rope_theta": 500000.0,
            "rope_scaling": {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
                             "original_max_position_embeddings": 64, "rope_type": "llama3"},
            "pad_token_id": tok["pad"]})
        if name == "llama4_mm":          # the layout of the multimodal hub checkpoints; the text part is what counts
            base.pop("architectures")
            base = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4",
                    "boi_token_index": p["vocab"] - 3, "eoi_token_index": p["vocab"] - 2,
                    "image_token_index": p["vocab"] - 1, "tie_word_embeddings": False,
                    "eos_token_id": base["eos_token_id"], "torch_dtype": "float32", "transformers_version": "4.55.0",
                    "text_config": base,
                    "vision_config": {"model_type": "llama4_vision_model", "hidden_size": 16, "num_hidden_layers": 1,
                                      "num_attention_heads": 2, "intermediate_size": 64, "vision_output_dim": 16,
                                      "image_size": 28, "patch_size": 14, "num_channels": 3, "hidden_act": "gelu",
                                      "pixel_shuffle_ratio": 0.5, "projector_input_dim": 16,
                                      "projector_output_dim": 16, "norm_eps": 1e-5, "rope_theta": 10000}}
    elif f == "llama":
        base.update({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False,
            "num_key_value_heads": p["kv"], "intermediate_size": p["inter"], "mlp_bias": False, "pretraining_tp": 1,
            "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "eos_token_id": [tok["eos"], tok["im_end"]],
            "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                             "original_max_position_embeddings": 64, "rope_type": "llama3"}})
        base["head_dim"] = p.get("head_dim", p["hidden"] // p["heads"])
    elif f == "qwen3":
        base.update({
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False,
            "head_dim": p["head_dim"], "num_key_value_heads": p["kv"], "intermediate_size": p["inter"],
            "rms_norm_eps": 1e-6, "rope_theta": 1000000, "rope_scaling": None, "sliding_window": None,
            "use_sliding_window": False, "max_window_layers": p["layers"]})
    else:
        raise KeyError(f)
    return base


# --------------------------------------------------------------------------------------------------------------
# checkpoint files
# --------------------------------------------------------------------------------------------------------------
def read_checkpoint(d):
    idx = os.path.join(d, "model.safetensors.index.json")
    if os.path.exists(idx):
        files = sorted(set(json.load(open(idx))["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    sd = {}
    for fn in files:
        sd.update(load_file(os.path.join(d, fn)))
    return sd


def write_checkpoint(sd, d, shards=1):
    sd = {k: v.contiguous().clone() for k, v in sd.items()}
    if shards == 1:
        save_file(sd, os.path.join(d, "model.safetensors"), metadata={"format": "pt"})
        return
    keys = sorted(sd)
    total = sum(v.numel() * v.element_size() for v in sd.values())
    groups, acc, cur = [[]], 0, 0
    for k in keys:
        n = sd[k].numel() * sd[k].element_size()
        if acc + n > total * len(groups) / shards and groups[-1] and len(groups) < shards:
            groups.append([])
        groups[-1].append(k)
        acc += n
    wm = {}
    for i, g in enumerate(groups):
        fn = f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors"
        save_file({k: sd[k] for k in g}, os.path.join(d, fn), metadata={"format": "pt"})
        wm.update({k: fn for k in g})
    json.dump({"metadata": {"total_size": total}, "weight_map": wm},
              open(os.path.join(d, "model.safetensors.index.json"), "w"), indent=2, sort_keys=True)


def dequant_mxfp4_sd(sd):
    """Replace *_blocks/*_scales by dense tensors with transformers' own dequantizer."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors
    out = {}
    for k, v in sd.items():
        if k.endswith("_scales"):
            continue
        if k.endswith("_blocks"):
            stem = k[:-len("_blocks")]
            out[stem] = convert_moe_packed_tensors(v, sd[stem + "_scales"], dtype=torch.float32)
        else:
            out[k] = v
    return out


def auto_class(cfg):
    if cfg["architectures"][0] == "Llama4ForConditionalGeneration":
        return transformers.Llama4ForConditionalGeneration
    return AutoModelForCausalLM


def load_model(d, sd=None):
    """Load a model directory in float32 with eager attention.  `sd` replaces the stored weights (hub layout)."""
    cfg = json.load(open(os.path.join(d, "config.json")))
    kw = dict(attn_implementation="eager")
    kw["dtype"] = torch.float32
    if V5:
        kw["experts_implementation"] = "eager"
    quant = cfg.pop("quantization_config", None)
    if sd is None and quant is None:
        return auto_class(cfg).from_pretrained(d, **kw).eval()
    if sd is None:
        sd = read_checkpoint(d)
    if quant is not None:
        sd = dequant_mxfp4_sd(sd)
    with tempfile.TemporaryDirectory() as t:
        json.dump(cfg, open(os.path.join(t, "config.json"), "w"))
        write_checkpoint(sd, t)
        return auto_class(cfg).from_pretrained(t, **kw).eval()


def rnd(gen, shape, std):
    return torch.randn(shape, generator=gen, dtype=torch.float32) * std


def init_weights(model, f, gen):
    """Random weights with unit-gain scaling, so that activations, routing and logits are well spread."""
    for n, t in list(model.named_parameters()) + [(n, b) for n, b in model.named_buffers()
                                                  if n.endswith("e_score_correction_bias")]:
        s = t.shape
        if "vision_model" in n or "multi_modal" in n:
            v = rnd(gen, s, 0.1)
        elif n.endswith("e_score_correction_bias"):
            v = rnd(gen, s, 0.15)
        elif n.endswith("sinks"):
            v = rnd(gen, s, 1.0)
        elif "norm" in n.split(".")[-2]:
            v = 1.0 + rnd(gen, s, 0.2)
        elif n.endswith("bias") or n.endswith("_bias"):
            v = rnd(gen, s, 0.2)
        elif "embed_tokens" in n:
            v = rnd(gen, s, 0.5 if model.config.tie_word_embeddings else 1.0)
        elif "lm_head" in n:
            v = rnd(gen, s, 3.0 / math.sqrt(s[-1]))
        elif ".gate.weight" in n or ".router.weight" in n:
            v = rnd(gen, s, 2.0 / math.sqrt(s[-1]))
        elif t.dim() == 3:
            fan = s[1] if f in ("gpt_oss", "llama4_text") else s[2]
            v = rnd(gen, s, 1.4 / math.sqrt(fan))
        elif t.dim() == 2:
            v = rnd(gen, s, 1.0 / math.sqrt(s[-1]))
        else:
            raise ValueError(f"no init for {n} {tuple(s)}")
        t.data.copy_(v)


# MXFP4 encoder (our own, only used to make weights; decoding is always transformers' code)
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def mxfp4_encode(w):
    """w [E, in, out] float -> blocks [E, out, in/32, 16] u8, scales [E, out, in/32] u8 (E8M0, bias 127)."""
    x = w.transpose(1, 2).contiguous()
    E, O, I = x.shape
    x = x.reshape(E, O, I // 32, 32)
    amax = x.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    e = torch.floor(torch.log2(amax)) - 2
    y = x / torch.exp2(e)
    code = (y.abs().unsqueeze(-1) - FP4).abs().argmin(-1).to(torch.uint8)
    code = code | ((y < 0).to(torch.uint8) << 3)
    blocks = code[..., 0::2] | (code[..., 1::2] << 4)     # low nibble = even element
    return blocks.contiguous(), (e.squeeze(-1) + 127).to(torch.uint8).contiguous()


HUB_REQUIRED = {
    "gpt_oss": ["model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.router.bias",
                "model.layers.0.self_attn.sinks"],
    "qwen3_moe": ["model.layers.{m}.mlp.experts.0.gate_proj.weight", "model.layers.{m}.mlp.gate.weight",
                  "model.layers.0.self_attn.q_norm.weight"],
    "mixtral": ["model.layers.0.block_sparse_moe.experts.0.w1.weight", "model.layers.0.block_sparse_moe.gate.weight"],
    "deepseek_v2": ["model.layers.{m}.mlp.experts.0.up_proj.weight", "model.layers.{m}.mlp.shared_experts.up_proj.weight",
                    "model.layers.0.mlp.gate_proj.weight", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"],
    "deepseek_v3": ["model.layers.{m}.mlp.experts.0.up_proj.weight", "model.layers.{m}.mlp.gate.e_score_correction_bias",
                    "model.layers.0.self_attn.q_a_proj.weight"],
    "llama4_text": ["model.layers.1.feed_forward.experts.gate_up_proj", "model.layers.1.feed_forward.router.weight",
                    "model.layers.1.feed_forward.shared_expert.gate_proj.weight"],
    "llama": ["model.layers.0.mlp.gate_proj.weight"], "qwen3": ["model.layers.0.self_attn.k_norm.weight"],
}


def first_moe_layer(name, p):
    f = family_of(name)
    if f == "qwen3_moe":
        return [i for i in range(p["layers"]) if i not in p["mlp_only"] and (i + 1) % p["sparse_step"] == 0][0]
    if f.startswith("deepseek"):
        return p["first_dense"]
    if f == "llama4_text":
        return p["moe_step"] - 1
    return 0


def make_model(name, p, d, tok, tokdir, gen):
    f = family_of(name)
    os.makedirs(d, exist_ok=True)
    for fn in os.listdir(tokdir):
        shutil.copy(os.path.join(tokdir, fn), d)
    if name == "mixtral":                # older repositories keep the chat template inside tokenizer_config.json
        tc = json.load(open(os.path.join(d, "tokenizer_config.json")))
        tc["chat_template"] = open(os.path.join(d, "chat_template.jinja")).read()
        json.dump(tc, open(os.path.join(d, "tokenizer_config.json"), "w"), indent=2)
        os.remove(os.path.join(d, "chat_template.jinja"))
    cfg = hub_config(name, p, tok)
    json.dump(cfg, open(os.path.join(d, "config.json"), "w"), indent=2)
    eos = cfg["eos_token_id"]
    gc = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8,
          "eos_token_id": sorted({tok["im_end"], *(eos if isinstance(eos, list) else [eos])}),
          "pad_token_id": tok["pad"], "bos_token_id": tok["bos"], "transformers_version": "4.55.0"}
    json.dump(gc, open(os.path.join(d, "generation_config.json"), "w"), indent=2)
    plain = {k: v for k, v in cfg.items() if k not in ("quantization_config",)}
    with tempfile.TemporaryDirectory() as t:
        json.dump(plain, open(os.path.join(t, "config.json"), "w"))
        config = AutoConfig.from_pretrained(t)
        config._experts_implementation = "eager"
        if name == "llama4_mm":
            config._attn_implementation = "eager"
            model = auto_class(cfg)._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
        else:
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
        init_weights(model, f, gen)
        dt = STORE_DTYPE.get(name, torch.float32)
        save = os.path.join(t, "save")
        m2 = model
        if dt != torch.float32:
            m2 = copy.deepcopy(model).to(dt)
            m2.config.dtype = dt
        m2.save_pretrained(save)
        sd = read_checkpoint(save)
        if CONFIG_STYLE.get(name) == "v5":
            shutil.copy(os.path.join(save, "config.json"), os.path.join(d, "config.json"))
    if f == "deepseek_v3":
        pass
    for k in HUB_REQUIRED[f]:
        k = ("language_model." if name == "llama4_mm" else "") + k.format(m=first_moe_layer(name, p))
        assert k in sd, f"{name}: save_pretrained did not write hub name {k}: {sorted(sd)[:20]}"
    if p.get("tie"):
        sd.pop("lm_head.weight", None)
    if name == "gpt_oss_mxfp4":
        out = {}
        for k, v in sd.items():
            if k.endswith("experts.gate_up_proj") or k.endswith("experts.down_proj"):
                out[k + "_blocks"], out[k + "_scales"] = mxfp4_encode(v.float())
            else:
                out[k] = v
        sd = out
    write_checkpoint(sd, d, SHARDED.get(name, 1))
    if name not in STORE_DTYPE:      # reloaded from disk == in memory
        ids = torch.arange(20) + 10
        a = logits_of(model, ids)
        b = logits_of(load_model(d), ids)
        assert torch.equal(a, b) or (a - b).abs().max() < 1e-5, (name, (a - b).abs().max())
    return sd


# --------------------------------------------------------------------------------------------------------------
# adapters
# --------------------------------------------------------------------------------------------------------------
ATTN = ["q_proj", "k_proj", "v_proj", "o_proj"]


def attn_targets(name, p):
    if family_of(name).startswith("deepseek"):
        q = ["q_proj"] if p["q_lora"] is None else ["q_a_proj", "q_b_proj"]
        return q + ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    return ATTN


def fused_params(f):
    pre = "feed_forward.experts" if f == "llama4_text" else "mlp.experts"
    return [f"{pre}.gate_up_proj", f"{pre}.down_proj"]


def adapter_plan(name, p, ranks):
    """name -> dict(kind=peft|per_expert, cfg=LoraConfig kwargs, dtype, allow_merged)"""
    f = family_of(name)
    at = attn_targets(name, p)
    moe = f not in ("llama", "qwen3")
    big, (pr0, pr1) = ranks["big"], ranks["pattern"]
    per = {"mixtral": ["w1", "w2", "w3"]}.get(f, ["gate_proj", "up_proj", "down_proj"])
    q0 = at[0]
    plan = {}
    plan[f"attn_r{ranks['attn']}"] = dict(kind="peft", cfg=dict(r=ranks["attn"], lora_alpha=2 * ranks["attn"],
                                                            target_modules=at))
    rs = dict(r=big, lora_alpha=24, use_rslora=True, target_modules=at,
              rank_pattern={rf"layers\.1\.self_attn\.{q0}": pr0, "o_proj": pr1},
              alpha_pattern={rf"layers\.1\.self_attn\.{q0}": 7, r"layers\.0\.self_attn\.o_proj": 11})
    if not moe:
        rs["target_modules"] = at + ["gate_proj", "up_proj", "down_proj"]
        rs["rank_pattern"]["up_proj"] = 3
        plan[f"all_r{big}_rslora_pattern"] = dict(kind="peft", cfg=rs, dtype=getattr(torch, ranks["big_dtype"]))
        plan[f"mlp_r{ranks['experts']}_bf16"] = dict(
            kind="peft", dtype=torch.bfloat16,
            cfg=dict(r=ranks["experts"], lora_alpha=8, target_modules=["gate_proj", "up_proj", "down_proj"],
                     layers_to_transform=[1], layers_pattern="layers"))
        return plan
    fp = fused_params(f)
    alt = {"gpt_oss": "0.20.0", "llama4_text": "0.18.1", "qwen3_moe": "0.19.0"}.get(f)
    alt_spec = dict(kind="alt_orientation", allow_merged=True, peft_version=alt,
                    cfg=dict(r=ranks["experts"], lora_alpha=3 * ranks["experts"], target_modules=at, target_parameters=fp))
    if name == "llama4_mm":
        rx = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|shared_expert\.down_proj)"
        plan = {f"experts_fused_r{ranks['experts']}": dict(
            kind="peft", cfg=dict(r=ranks["experts"], lora_alpha=2 * ranks["experts"], target_modules=rx,
                                  target_parameters=fp))}
        return plan
    plan[f"experts_fused_r{ranks['experts']}"] = dict(
        kind="peft", cfg=dict(r=ranks["experts"], lora_alpha=2 * ranks["experts"], target_modules=at,
                              target_parameters=fp))
    if name in ("gpt_oss_bf16", "gpt_oss_mxfp4", "qwen3_moe_sparse"):
        if f == "qwen3_moe":
            plan.pop(f"attn_r{ranks['attn']}")
            plan[f"per_expert_r{ranks['per_expert']}"] = dict(
                kind="per_expert", allow_merged=True,
                cfg=dict(r=ranks["per_expert"], lora_alpha=8, target_modules=at + per))
        else:
            plan[f"experts_fused_r{ranks['experts']}"]["dtype"] = torch.bfloat16
        if name == "gpt_oss_mxfp4":
            plan[f"experts_fused_alt_r{ranks['experts']}"] = alt_spec
        return plan
    if f not in ("gpt_oss", "llama4_text"):
        plan[f"per_expert_r{ranks['per_expert']}"] = dict(
            kind="per_expert", allow_merged=True,
            cfg=dict(r=ranks["per_expert"], lora_alpha=3 * ranks["per_expert"] // 2, target_modules=at + per))
        if name in ("deepseek_v2_lite", "deepseek_v3"):
            plan[f"per_expert_regex_r{ranks['per_expert']}"] = dict(
                kind="per_expert", cfg=dict(r=ranks["per_expert"], lora_alpha=2 * ranks["per_expert"],
                                            target_modules=r".*\.experts\..*(gate_proj|up_proj|down_proj)"))
    # rank not a multiple of 16, rsLoRA, patterns, only the down projection of the experts
    rs = dict(rs, target_parameters=[fp[1]])
    rs["rank_pattern"] = dict(rs["rank_pattern"], **{fp[1].replace(".", r"\."): pr1})
    plan[f"r{big}_rslora_pattern"] = dict(kind="peft", cfg=rs, dtype=getattr(torch, ranks["big_dtype"]))
    if alt:
        plan[f"experts_fused_alt_r{ranks['experts']}"] = alt_spec
    if f == "qwen3_moe":
        plan[f"per_expert_rslora_r{pr1}"] = dict(
            kind="per_expert", allow_merged=True, dtype=torch.bfloat16,
            cfg=dict(r=pr1, lora_alpha=6, use_rslora=True, target_modules=["q_proj"] + per + ["gate"]))
    if f == "gpt_oss":
        plan[f"gate_up_only_r{pr1}_bf16"] = dict(
            kind="peft", dtype=torch.bfloat16,
            cfg=dict(r=pr1, lora_alpha=10, target_modules=[], target_parameters=[fp[0]]))
        plan[f"router_r{ranks['experts']}"] = dict(
            kind="peft", cfg=dict(r=ranks["experts"], lora_alpha=8, target_modules=["q_proj", "v_proj"],
                                  target_parameters=["mlp.router.weight"]))
    return plan


def pattern_value(patterns, name, default):
    for k, v in (patterns or {}).items():
        if re.match(rf"(.*\.)?({k})$", name):
            return v
    return default


def lora_scaling(cfg, name, r):
    a = pattern_value(cfg.get("alpha_pattern"), name, cfg["lora_alpha"])
    r_ = pattern_value(cfg.get("rank_pattern"), name, cfg["r"])
    assert r_ == r, (name, r_, r)
    return a / math.sqrt(r) if cfg.get("use_rslora") else a / r


def fill_lora(sd, cfg, gen, dtype, experts, gain):
    """Random A and B.  std(B) is chosen so that std(dW) = gain/sqrt(in), i.e. comparable with the base weight."""
    out = {}
    for k in sorted(sd):
        if ".lora_A." in k:
            A, B = sd[k], sd[k.replace(".lora_A.", ".lora_B.")]
            e = experts if re.search(r"experts(\.base_layer)?\.lora_A", k) else 1
            r = A.shape[0] // e
            base = k.replace("base_model.model.", "", 1).rsplit(".lora_A", 1)[0]
            alpha = cfg["lora_alpha"]
            s = alpha / math.sqrt(r) if cfg.get("use_rslora") else alpha / r
            out[k] = rnd(gen, A.shape, 1.0 / math.sqrt(A.shape[1])).to(dtype)
            out[k.replace(".lora_A.", ".lora_B.")] = rnd(gen, B.shape, gain / (s * math.sqrt(r))).to(dtype)
    assert set(out) == set(sd), (sorted(sd)[:4], sorted(set(sd) - set(out))[:4])
    return out


def make_adapter(name, p, model_dir, hub_sd, adir, spec, gen, gain):
    f = family_of(name)
    os.makedirs(adir, exist_ok=True)
    dt = spec.get("dtype", torch.float32)
    cfg = LoraConfig(task_type="CAUSAL_LM", base_model_name_or_path=f"golden/{name}", **spec["cfg"])
    if spec["kind"] in ("peft", "alt_orientation"):
        m = get_peft_model(load_model(model_dir), cfg)
        m.peft_config["default"].base_model_name_or_path = f"golden/{name}"
        m.save_pretrained(adir)
        sd = load_file(os.path.join(adir, "adapter_model.safetensors"))
        readme = os.path.join(adir, "README.md")
        if os.path.exists(readme):
            os.remove(readme)
        if spec["kind"] == "alt_orientation":     # the transposed factor shapes that other PEFT versions write
            for k in [k for k in sd if re.search(r"experts(\.base_layer)?\.lora_A", k)]:
                kb = k.replace(".lora_A.", ".lora_B.")
                (er, ac_), bo = sd[k].shape, sd[kb].shape[0]
                sd[k], sd[kb] = torch.empty(er, bo), torch.empty(ac_, er)
    else:
        cfg.inference_mode = True
        cfg.save_pretrained(adir)
        t = spec["cfg"]["target_modules"]
        sd = {}
        for k, v in hub_sd.items():
            m = re.match(r"(.*)\.weight$", k)
            if m and v.dim() == 2 and (re.fullmatch(t, m.group(1)) if isinstance(t, str)
                                       else m.group(1).rsplit(".", 1)[-1] in t):
                r = spec["cfg"]["r"]
                pre = f"base_model.model.{m.group(1)}"
                sd[f"{pre}.lora_A.weight"] = torch.empty(r, v.shape[1])
                sd[f"{pre}.lora_B.weight"] = torch.empty(v.shape[0], r)
    sd = fill_lora(sd, spec["cfg"], gen, dt, p.get("experts", 1), gain)
    save_file(sd, os.path.join(adir, "adapter_model.safetensors"), metadata={"format": "pt"})
    # deterministic adapter_config.json: lists sorted
    ac = json.load(open(os.path.join(adir, "adapter_config.json")))
    for k in ("target_modules", "target_parameters"):
        if isinstance(ac.get(k), list):
            ac[k] = sorted(ac[k])
    if spec.get("peft_version"):
        ac["peft_version"] = spec["peft_version"]
    json.dump(ac, open(os.path.join(adir, "adapter_config.json"), "w"), indent=2, sort_keys=True)


def numpy_merge(name, p, hub_sd, adir):
    """Independent implementation: add scaling * B @ A to the checkpoint tensors (hub layout), in float64."""
    f = family_of(name)
    cfg = json.load(open(os.path.join(adir, "adapter_config.json")))
    ad = {k: v.to(torch.float64).numpy() for k, v in load_file(os.path.join(adir, "adapter_model.safetensors")).items()}
    W = {k: v for k, v in hub_sd.items()}
    delta = {}

    def add(k, dw):
        assert k in W and tuple(W[k].shape) == dw.shape, (k, dw.shape, W[k].shape if k in W else None)
        delta[k] = delta.get(k, 0) + dw

    E = p.get("experts", 1)
    for key in sorted(ad):
        if not key.endswith(".lora_A.weight"):
            continue
        A, B = ad[key], ad[key.replace(".lora_A.", ".lora_B.")]
        mod = key[len("base_model.model."):-len(".lora_A.weight")]
        if re.search(r"\.experts(\.base_layer)?$", mod):
            inner = mod.endswith(".base_layer")
            mod_ = mod[:-len(".base_layer")] if inner else mod
            both = (f"base_model.model.{mod_}.base_layer.lora_A.weight") in ad
            if both:
                pname = "gate_up_proj" if inner else "down_proj"
            else:
                pname = cfg["target_parameters"][0].rsplit(".", 1)[-1]
            r = A.shape[0] // E
            s = lora_scaling(cfg, f"{mod_}.{pname}", r)
            stored_io = f in ("gpt_oss", "llama4_text")          # checkpoint keeps [E, in, out]
            root = mod_.replace(".mlp.experts", ".block_sparse_moe.experts") if f == "mixtral" else mod_
            gn, un, dn = ("w1", "w3", "w2") if f == "mixtral" else ("gate_proj", "up_proj", "down_proj")

            def dims(pn):
                if stored_io:
                    return tuple(W[f"{root}.{pn}"].shape[1:])
                if pn == "gate_up_proj":
                    o, i = W[f"{root}.0.{gn}.weight"].shape
                    return i, 2 * o
                o, i = W[f"{root}.0.{dn}.weight"].shape
                return i, o

            # orientation: natural = A over `in`, B over `out`; some PEFT versions write A over `out`, B over `in`.
            natural = None
            for pn, k2 in ((pname, key), *((("gate_up_proj", f"base_model.model.{mod_}.base_layer.lora_A.weight"),
                                            ("down_proj", f"base_model.model.{mod_}.lora_A.weight")) if both else ())):
                i_, o_ = dims(pn)
                if i_ != o_ and natural is None:
                    got = (ad[k2].shape[1], ad[k2.replace(".lora_A.", ".lora_B.")].shape[0])
                    assert got in ((i_, o_), (o_, i_)), (k2, got, (i_, o_))
                    natural = got == (i_, o_)
            if natural is None:
                natural = f != "llama4_text"                     # what PEFT 0.21 with transformers 5 writes
            # A rows: expert-major (row = e*r + j);  B columns: rank-major (col = j*E + e)
            for e in range(E):
                Ae = A[e * r:(e + 1) * r, :]
                Be = B[:, [j * E + e for j in range(r)]]
                dw = s * (Be @ Ae)                               # [B rows, A columns]
                if not natural:
                    dw = dw.T
                if stored_io:                                    # dw is [out, in]
                    k = f"{root}.{pname}"
                    z = delta.setdefault(k, np.zeros(W[k].shape))
                    z[e] += dw.T
                elif pname == "gate_up_proj":
                    I = dw.shape[0] // 2
                    add(f"{root}.{e}.{gn}.weight", dw[:I])
                    add(f"{root}.{e}.{un}.weight", dw[I:])
                else:
                    add(f"{root}.{e}.{dn}.weight", dw)
        else:
            r = A.shape[0]
            s = lora_scaling(cfg, mod + (".weight" if mod.endswith("mlp.router") else ""), r)
            add(f"{mod}.weight", s * (B @ A))
    out = {}
    for k, v in W.items():
        out[k] = torch.from_numpy((v.to(torch.float64).numpy() + delta[k]).astype(np.float32)) if k in delta else v
    return out


def load_with_adapter(model_dir, adir):
    m = load_model(model_dir)
    with warnings.catch_warnings(record=True) as w:
        warnings.simplefilter("always")
        pm = PeftModel.from_pretrained(m, adir).eval()
    msgs = [str(x.message) for x in w if "missing" in str(x.message).lower() or "unexpected" in str(x.message).lower()]
    return pm, msgs


# --------------------------------------------------------------------------------------------------------------
# running and recording
# --------------------------------------------------------------------------------------------------------------
def inner(model):
    m = model
    if isinstance(m, PeftModel):
        m = m.get_base_model()
    if hasattr(m, "language_model"):
        m = m.language_model
    return m


class Recorder:
    """Forward hooks: residual stream after each layer, router decision of each MoE layer."""

    def __init__(self, model, f, p):
        self.f, self.p, self.h = f, p, []
        self.layers, self.router, self.embed, self.final = {}, {}, None, None
        core = inner(model).model
        self.h.append(core.embed_tokens.register_forward_hook(self._embed))
        self.h.append(core.norm.register_forward_hook(self._final))
        for i, l in enumerate(core.layers):
            self.h.append(l.register_forward_hook(self._mk(self.layers, i)))
            blk = getattr(l, "mlp", None) if f != "llama4_text" else getattr(l, "feed_forward", None)
            r = getattr(blk, "router", None) if f in ("gpt_oss", "llama4_text") else getattr(blk, "gate", None)
            if r is not None:
                self.h.append(r.register_forward_hook(self._mk(self.router, i)))

    def _embed(self, m, a, o):
        self.embed = o

    def _final(self, m, a, o):
        self.final = o

    @staticmethod
    def _mk(store, i):
        def hook(m, a, o):
            store[i] = o
        return hook

    def close(self):
        for h in self.h:
            h.remove()

    def hidden(self):
        xs = [self.embed] + [o[0] if isinstance(o, tuple) else o for _, o in sorted(self.layers.items())] + [self.final]
        return torch.stack([x[0] for x in xs]).contiguous()

    def routing(self, model):
        """-> layer ids, logits [M,T,E], indices [M,T,K] (by descending weight), weights, min selection margin"""
        ids, L, I, Wt, margin = [], [], [], [], float("inf")
        k = self.p.get("topk", 0)
        for i, o in sorted(self.router.items()):
            ids.append(i)
            if self.f == "llama4_text":
                scores, logits = o
                idx = torch.topk(logits, k, dim=-1).indices
                wt = scores.gather(1, idx) if scores.shape == logits.shape else scores.T.gather(1, idx)
            else:
                logits, wt, idx = o
            sel = logits.float()
            if self.f.startswith("deepseek"):
                v3 = self.f == "deepseek_v3"
                sel = sel.sigmoid() if v3 else sel.log_softmax(-1)
                if v3:
                    core = inner(model).model.layers[i].mlp.gate
                    sel = sel + core.e_score_correction_bias
                g, tg = self.p["n_group"], self.p["topk_group"]
                if g > 1:
                    grp = sel.view(sel.shape[0], g, -1)
                    gs = grp.topk(2, -1).values.sum(-1) if v3 else grp.max(-1).values
                    gv = gs.sort(-1, descending=True)
                    if tg < g:
                        margin = min(margin, (gv.values[:, tg - 1] - gv.values[:, tg]).min().item())
                    mask = torch.zeros_like(gs).scatter_(1, gv.indices[:, :tg], 1).bool()
                    sel = grp.masked_fill(~mask[..., None], -1e9).view(sel.shape)
            sv = sel.sort(-1, descending=True).values
            if k < sv.shape[1]:
                margin = min(margin, (sv[:, k - 1] - sv[:, k]).min().item())
            order = wt.argsort(dim=-1, descending=True, stable=True)
            L.append(logits.float()); I.append(idx.gather(1, order)); Wt.append(wt.gather(1, order).float())
        if not ids:
            return None, margin
        return (ids, torch.stack(L).contiguous(), torch.stack(I).to(torch.int32).contiguous(),
                torch.stack(Wt).contiguous()), margin


def logits_of(model, ids):
    return inner(model)(input_ids=ids[None], use_cache=False).logits[0].float()


def run_prompt(model, f, p, ids, n_greedy, want_hidden):
    rec = Recorder(model, f, p)
    try:
        logits = logits_of(model, ids)
        routing, rmargin = rec.routing(model)
        hidden = rec.hidden() if want_hidden else None
        cur, tmargin, glp, gtop_i, gtop_v, gm = ids, float("inf"), [], [], [], []
        step = logits[-1]
        out = []
        for _ in range(n_greedy):
            lp = torch.log_softmax(step, -1)
            top = torch.topk(lp, 5)
            gm.append((top.values[0] - top.values[1]).item())
            tmargin = min(tmargin, gm[-1])
            t = int(top.indices[0])
            out.append(t); glp.append(top.values[0].item()); gtop_i.append(top.indices); gtop_v.append(top.values)
            cur = torch.cat([cur, torch.tensor([t])])
            step = logits_of(model, cur)[-1]
            _, m2 = rec.routing(model)
            rmargin = min(rmargin, m2)
    finally:
        rec.close()
    lp = torch.log_softmax(logits, -1)
    res = {"input_ids": ids.to(torch.int64), "logits": logits,
           "prompt_logprobs": lp[:-1].gather(1, ids[1:, None])[:, 0].contiguous(),
           "greedy_ids": torch.tensor(out, dtype=torch.int64), "greedy_logprobs": torch.tensor(glp),
           "greedy_top5_ids": torch.stack(gtop_i).to(torch.int32), "greedy_top5_logprobs": torch.stack(gtop_v)}
    if want_hidden:
        res["hidden_states"] = hidden
        if routing:
            res["router_logits"], res["router_indices"], res["router_weights"] = routing[1:]
    meta = {"router_margin": None if rmargin == float("inf") else rmargin, "greedy_margin": tmargin,
            "moe_layers": routing[0] if routing else []}
    return res, meta


R_OK, T_OK = 1e-4, 5e-3


def build_model_set(name, params, out, tok, tokdir, seed, log):
    p = params["models"][name]
    f = family_of(name)
    gen = torch.Generator().manual_seed(int(hashlib.sha256(f"{seed}/{name}".encode()).hexdigest()[:12], 16))
    mdir = os.path.join(out, "models", name)
    for sub in ("models", "adapters", "expected"):
        shutil.rmtree(os.path.join(out, sub, name), ignore_errors=True)
    hub_sd = make_model(name, p, mdir, tok, tokdir, gen)
    dense_sd = dequant_mxfp4_sd(hub_sd) if name == "gpt_oss_mxfp4" else hub_sd
    plan = adapter_plan(name, p, params["ranks"])
    runs, sources = {"base": load_model(mdir)}, {"base": {"golden_source": "transformers"}}
    hi = min(params["tokenizer"]["vocab_size"], p["vocab"]) - 4
    probe = torch.randint(6, hi, (40,), generator=gen)
    base_probe = logits_of(runs["base"], probe)
    if name == "gpt_oss_mxfp4":
        # transformers' own quantized-checkpoint loader (dequantize=True) must agree
        from transformers import Mxfp4Config
        q = AutoModelForCausalLM.from_pretrained(mdir, attn_implementation="eager", experts_implementation="eager",
                                                 dtype=torch.float32,
                                                 quantization_config=Mxfp4Config(dequantize=True)).eval().float()
        dq = (logits_of(q, probe) - base_probe).abs().max().item()
        log(f"  mxfp4: own dequantization vs from_pretrained(Mxfp4Config(dequantize=True)): {dq:.2e}")
        assert dq < 1e-4
    for an, spec in plan.items():
        adir = os.path.join(out, "adapters", name, an)
        make_adapter(name, p, mdir, hub_sd, adir, spec, gen, 0.6)
        merged = load_model_sd(mdir, numpy_merge(name, p, dense_sd, adir))
        ml = logits_of(merged, probe)
        err, msgs = None, []
        try:
            pm, msgs = load_with_adapter(mdir, adir)
            err = (logits_of(pm, probe) - ml).abs().max().item()
        except Exception as e:                                     # noqa: BLE001
            msgs = [f"{type(e).__name__}: {str(e)[:160]}"]
        chg = (ml.argmax(-1) != base_probe.argmax(-1)).float().mean().item()
        ok = err is not None and err < 2e-4
        if not ok:
            assert spec.get("allow_merged"), (name, an, err, msgs)
        src = "peft" if ok else "merged"
        runs[an] = pm if ok else merged
        sources[an] = {"golden_source": src, "peft_vs_numpy_merge_max_abs": err, "argmax_changed_fraction": round(chg, 3),
                       "layout": {"per_expert": "per_expert", "alt_orientation": "fused_parameter_alt_orientation"}[spec["kind"]] if spec["kind"] != "peft" else
                       ("fused_parameter" if spec["cfg"].get("target_parameters") else "module"),
                       "adapter_dtype": str(spec.get("dtype", torch.float32)).split(".")[-1]}
        if not ok:
            sources[an]["peft_note"] = (msgs[0][:200] if msgs else "PEFT output differs from per-module LoRA semantics")
        log(f"  {an}: source={src} peft-vs-merge={err if err is None else format(err, '.1e')} argmax changed={chg:.0%} {msgs[:1] if not ok else ''}")
        assert chg > 0.1
    # prompts: resample until no routing / argmax decision is a near tie in any run
    lens = params["prompt_lengths"]
    hid_prompt = min(range(len(lens)), key=lambda i: abs(lens[i] - 33))
    results = {r: {} for r in runs}
    metas = {r: {} for r in runs}
    for i, T in enumerate(lens):
        best = None
        for attempt in range(40):
            ids = torch.randint(6, hi, (T,), generator=gen)
            cand, worst = {}, float("inf")
            for r, m in runs.items():
                cand[r] = run_prompt(m, f, p, ids, params["greedy_tokens"],
                                     i == hid_prompt and (r == "base" or params["hidden_for"] == "all"))
                rm, tm = cand[r][1]["router_margin"], cand[r][1]["greedy_margin"]
                worst = min(worst, tm / T_OK, (rm / R_OK) if rm is not None else 1e9)
                if worst < 1 and best is not None and worst <= best[0]:
                    break
            else:
                if best is None or worst > best[0]:
                    best = (worst, cand)
            if best and best[0] >= 1:
                break
        for r in runs:
            results[r][f"p{i}"], metas[r][f"p{i}"] = best[1][r]
        log(f"  prompt p{i} len={T}: margin score {best[0]:.2f} (>=1 is comfortable) after {attempt + 1} tries")
    edir = os.path.join(out, "expected", name)
    os.makedirs(edir, exist_ok=True)
    for r in runs:
        tens, meta = {}, {"model": name, "adapter": None if r == "base" else r, **sources[r], "prompts": {}}
        for pn, res in results[r].items():
            T = len(res["input_ids"])
            start = 0
            if r != "base" and T == max(lens) and T > params["long_tail"]:
                start = T - params["long_tail"]
            res = dict(res)
            res["logits"] = res["logits"][start:].contiguous()
            tens.update({f"{pn}.{k}": v.contiguous() for k, v in res.items()})
            meta["prompts"][pn] = {"length": T, "logits_start": start, **metas[r][pn],
                                   "input_ids": res["input_ids"].tolist(), "greedy_ids": res["greedy_ids"].tolist()}
        save_file(tens, os.path.join(edir, f"{r}.safetensors"))
        json.dump(meta, open(os.path.join(edir, f"{r}.json"), "w"), indent=1)
    # a heterogeneous batch: the expected rows are the per-sequence goldens
    names = list(runs)
    seqs = [{"adapter": None if names[j % len(names)] == "base" else names[j % len(names)], "prompt": f"p{j % len(lens)}",
             "expected": f"{names[j % len(names)]}.safetensors"} for j in range(max(len(names), len(lens)) * 2 - 1)]
    json.dump({"model": name, "sequences": seqs}, open(os.path.join(edir, "mixed_batch.json"), "w"), indent=1)


def load_model_sd(d, sd):
    cfg = json.load(open(os.path.join(d, "config.json")))
    cfg.pop("quantization_config", None)
    kw = dict(attn_implementation="eager", dtype=torch.float32)
    if V5:
        kw["experts_implementation"] = "eager"
    with tempfile.TemporaryDirectory() as t:
        json.dump(cfg, open(os.path.join(t, "config.json"), "w"))
        write_checkpoint(sd, t)
        return auto_class(cfg).from_pretrained(t, **kw).eval()


# --------------------------------------------------------------------------------------------------------------
# tokenizer
# --------------------------------------------------------------------------------------------------------------
CORPUS = """The runtime loads a model and many small adapters. Every request names an adapter, and the server answers with text.
A mixture of experts sends each token to a few experts; the router chooses which. What is the weather like today?
Please write a short story about the river and the old stone bridge. She said: "Where are you going?" He did not answer.
In the morning the light was thin and the water was cold. They walked together along the road to the market town.
def add(a, b):\n    return a + b\n\nfor i in range(10):\n    print(i, add(i, 1))\n
You are a helpful assistant. The user asks a question and the assistant gives an answer. Numbers: 0 1 2 3 10 42 100 2026.
Der schnelle braune Fuchs springt über den faulen Hund. Le café est fermé. Привет, мир! 你好，世界。 こんにちは。 🙂🚀
The answer is that the other one is there, and then the others were there with them for that reason.
"""
CHAT_TEMPLATE = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{%- if tools %}
    {{- '<|im_start|>tools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson + '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for m in rest %}
    {%- if m['role'] not in ['user', 'assistant', 'tool'] %}
        {{- raise_exception('unknown role: ' + m['role']) }}
    {%- endif %}
    {{- '<|im_start|>' + m['role'] + '\\n' + (m['content'] | trim) + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def make_tokenizer(d, vocab):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers, Regex
    from transformers import PreTrainedTokenizerFast
    os.makedirs(d, exist_ok=True)
    t = Tokenizer(models.BPE())
    pat = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pat), "isolated"),
                                               pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    t.decoder = decoders.ByteLevel()
    t.post_processor = processors.ByteLevel(trim_offsets=False)
    sp = ["<|begin_of_text|>", "<|end_of_text|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
    t.train_from_iterator([CORPUS] * 3, trainers.BpeTrainer(
        vocab_size=vocab, min_frequency=1, special_tokens=sp, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    assert t.get_vocab_size() == vocab, t.get_vocab_size()
    fast = PreTrainedTokenizerFast(tokenizer_object=t, bos_token=sp[0], eos_token=sp[4], pad_token=sp[2],
                                   additional_special_tokens=[sp[3]], model_max_length=256,
                                   clean_up_tokenization_spaces=False)
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(d)
    ids = {k: t.token_to_id(v) for k, v in zip(["bos", "eos", "pad", "im_start", "im_end"], sp)}
    return ids


def tokenizer_golden(d, out):
    from transformers import AutoTokenizer
    tk = AutoTokenizer.from_pretrained(d)
    texts = ["", " ", "a", "Hello, world!", "The router chooses two experts.", "  leading and  double spaces ",
             "def add(a, b):\n    return a + b\n", "über café Привет 你好，世界。", "🙂🚀 emoji", "1234567890",
             "<|im_start|>user\nhi<|im_end|>\n", "tab\tand\r\nnewline\n\n\n", "it's they'll I'd", "é", "\u0000\u0001"]
    enc = [{"text": t, "ids": tk.encode(t, add_special_tokens=False), "decoded": tk.decode(tk.encode(t, add_special_tokens=False)),
            "decoded_skip_special": tk.decode(tk.encode(t, add_special_tokens=False), skip_special_tokens=True)} for t in texts]
    chats = [[{"role": "user", "content": "What is the weather like today?"}],
             [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": " hi "},
              {"role": "assistant", "content": "Hello! 🙂"}, {"role": "user", "content": "Write a story."}]]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}}]
    ch = []
    for m in chats:
        for agp in (True, False):
            for tl in (None, tools):
                txt = tk.apply_chat_template(m, tokenize=False, add_generation_prompt=agp, tools=tl)
                ch.append({"messages": m, "add_generation_prompt": agp, "tools": tl, "text": txt,
                           "ids": tk.encode(txt, add_special_tokens=False)})
    ids = tk.encode("über 🙂 你好", add_special_tokens=False)
    stream = [tk.decode(ids[:i + 1]) for i in range(len(ids))]   # contains U+FFFD until a character is complete
    json.dump({"encode": enc, "chat": ch, "incremental_decode": {"ids": ids, "prefix_texts": stream},
               "bad_chat": {"messages": [{"role": "alien", "content": "x"}], "error_contains": "unknown role: alien"}},
              open(out, "w"), indent=1, ensure_ascii=False)


# --------------------------------------------------------------------------------------------------------------
# adapters that must be refused
# --------------------------------------------------------------------------------------------------------------
def make_bad(out, params, seed, base="qwen3_moe"):
    """Adapters to refuse. With another `base` than the set's own, only the faults that are otherwise shown on
    qwen3_moe, in a folder of their own: for runtimes that serve that base first."""
    bdir = os.path.join(out, "bad_adapters" if base == "qwen3_moe" else f"bad_adapters_{base}")
    shutil.rmtree(bdir, ignore_errors=True)
    gen = torch.Generator().manual_seed(seed + 99)
    index = {}
    R = params["ranks"]

    def emit(name, model, reason, src, cfg_edit=None, sd_edit=None, raw=None, category="invalid"):
        d = os.path.join(bdir, name)
        os.makedirs(d)
        s = os.path.join(out, "adapters", model, src)
        cfg = json.load(open(os.path.join(s, "adapter_config.json")))
        sd = {k: v.to(torch.bfloat16) for k, v in load_file(os.path.join(s, "adapter_model.safetensors")).items()}
        if cfg_edit:
            cfg_edit(cfg)
        if sd_edit:
            sd = sd_edit(sd) or sd
        json.dump(cfg, open(os.path.join(d, "adapter_config.json"), "w"), indent=2, sort_keys=True)
        save_file({k: v.contiguous().clone() for k, v in sd.items()}, os.path.join(d, "adapter_model.safetensors"), metadata={"format": "pt"})
        if raw:
            raw(d)
        index[name] = {"model": model, "category": category, "reason": reason}

    A = f"attn_r{R['attn']}"
    FU = f"experts_fused_r{R['experts']}"
    Q, G = base, "gpt_oss"
    k0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    kb = k0.replace("lora_A", "lora_B")
    kf = "base_model.model.model.layers.0.mlp.experts.lora_A.weight"
    kfb = kf.replace("lora_A", "lora_B")

    def setk(k, fn):
        def g(sd):
            sd[k] = fn(sd[k]).contiguous()
        return g

    def pop(k):
        return lambda sd: (sd.pop(k), None)[1]

    def poke(k, v):
        def g(sd):
            sd[k] = sd[k].clone(); sd[k].view(-1)[5] = v
        return g

    emit("wrong_in_dim", Q, "lora_A input size differs from the module's", A, sd_edit=setk(k0, lambda t: torch.cat([t, t[:, :4]], 1)), category="shape")
    emit("wrong_out_dim", Q, "lora_B output size differs from the module's", A, sd_edit=setk(kb, lambda t: t[:-2]), category="shape")
    emit("rank_mismatch_ab", Q, "rows of lora_A and columns of lora_B differ", A, sd_edit=setk(kb, lambda t: t[:, :-1]), category="shape")
    emit("rank_mismatch_config", Q, "r in adapter_config.json differs from the tensors", A, cfg_edit=lambda c: c.update(r=R["attn"] // 2), category="shape")
    emit("one_dimensional", Q, "lora_A has one dimension", A, sd_edit=setk(k0, lambda t: t.reshape(-1)), category="shape")
    emit("missing_b", Q, "lora_A without its lora_B", A, sd_edit=pop(kb), category="missing_tensor")
    emit("missing_a", Q, "lora_B without its lora_A", A, sd_edit=pop(k0), category="missing_tensor")
    emit("nan_weights", Q, "a NaN in lora_A", A, sd_edit=poke(k0, float("nan")), category="non_finite")
    emit("inf_weights", Q, "an infinity in lora_B", A, sd_edit=poke(kb, float("inf")), category="non_finite")
    emit("unknown_module", Q, "target module that the model does not have", A,
         cfg_edit=lambda c: c.update(target_modules=c["target_modules"] + ["foo_proj"]),
         sd_edit=lambda sd: {**sd, k0.replace("q_proj", "foo_proj"): sd[k0], kb.replace("q_proj", "foo_proj"): sd[kb]}, category="unknown_target")
    emit("unknown_key_suffix", Q, "tensor name that is not a LoRA tensor", A, sd_edit=lambda sd: {**sd, k0.replace("lora_A.weight", "lokr_w1"): sd[k0]}, category="unknown_target")
    emit("layer_out_of_range", Q, "tensor for a layer the model does not have", A,
         sd_edit=lambda sd: {**sd, k0.replace("layers.0.", "layers.99."): sd[k0], kb.replace("layers.0.", "layers.99."): sd[kb]}, category="unknown_target")
    PE = f"per_expert_r{R['per_expert']}"
    ke = "base_model.model.model.layers.0.mlp.experts.0.gate_proj.lora_A.weight"
    if not os.path.isdir(os.path.join(out, "adapters", Q, PE)):        # no such layout in the set: one module beside attention
        H, inter, r = params["models"][Q]["hidden"], params["models"][Q]["inter"], R["attn"]
        far = ke.replace("experts.0.", "experts.77.")
        emit("expert_out_of_range", Q, "tensor for an expert the model does not have", A,
             cfg_edit=lambda c: c.update(target_modules=c["target_modules"] + ["gate_proj"]),
             sd_edit=lambda sd: {**sd, far: rnd(gen, (r, H), 0.1).to(torch.bfloat16),
                                 far.replace("lora_A", "lora_B"): rnd(gen, (inter, r), 0.1).to(torch.bfloat16)}, category="unknown_target")
    else:
        emit("expert_out_of_range", Q, "tensor for an expert the model does not have", PE,
             sd_edit=lambda sd: {**sd, ke.replace("experts.0.", "experts.77."): sd[ke],
                                 ke.replace("experts.0.", "experts.77.").replace("lora_A", "lora_B"): sd[ke.replace("lora_A", "lora_B")]}, category="unknown_target")

    def huge(sd):
        H = params["models"][Q]["hidden"]
        o = sd["base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight"].shape[0]
        return {"base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight": rnd(gen, (1040, H), 0.1).to(torch.bfloat16),
                "base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight": rnd(gen, (o, 1040), 0.1).to(torch.bfloat16)}
    emit("rank_over_limit", Q, "rank 1040, over any sensible server limit", A, cfg_edit=lambda c: c.update(r=1040, target_modules=["k_proj"]), sd_edit=huge, category="rank_limit")
    emit("rank_zero", Q, "r is 0", A, cfg_edit=lambda c: c.update(r=0), category="config")
    emit("alpha_not_number", Q, "lora_alpha is a string", A, cfg_edit=lambda c: c.update(lora_alpha="sixteen"), category="config")
    emit("other_peft_type", Q, "peft_type is not LORA", A, cfg_edit=lambda c: c.update(peft_type="LOHA"), category="unsupported")
    emit("modules_to_save", Q, "modules_to_save carries a full lm_head", A, cfg_edit=lambda c: c.update(modules_to_save=["lm_head"]),
         sd_edit=lambda sd: {**sd, "base_model.model.lm_head.weight": rnd(gen, (params["models"][Q]["vocab"], params["models"][Q]["hidden"]), 0.1)}, category="unsupported")
    emit("integer_weights", Q, "lora_A stored as int32", A, sd_edit=setk(k0, lambda t: (t * 100).to(torch.int32)), category="dtype")
    emit("fan_in_fan_out", Q, "fan_in_fan_out set for ordinary Linear layers", A, cfg_edit=lambda c: c.update(fan_in_fan_out=True), category="unsupported")

    def trunc(frac):
        def g(d):
            fn = os.path.join(d, "adapter_model.safetensors")
            b = open(fn, "rb").read()
            open(fn, "wb").write(b[:int(len(b) * frac)])
        return g

    def write(fn, data):
        return lambda d: open(os.path.join(d, fn), "wb").write(data)
    emit("truncated_data", Q, "safetensors cut in the data", A, raw=trunc(0.6), category="corrupt_file")
    emit("truncated_header", Q, "safetensors cut in the header", A, raw=lambda d: write("adapter_model.safetensors", open(os.path.join(d, "adapter_model.safetensors"), "rb").read()[:100])(d), category="corrupt_file")
    emit("header_length_huge", Q, "safetensors header length beyond the file", A, raw=lambda d: write("adapter_model.safetensors", b"\xff\xff\xff\xff\xff\xff\xff\x7f{}")(d), category="corrupt_file")
    emit("empty_weights_file", Q, "zero-byte weights", A, raw=write("adapter_model.safetensors", b""), category="corrupt_file")
    emit("bad_json", Q, "adapter_config.json is not JSON", A, raw=write("adapter_config.json", b'{"peft_type": "LORA", '), category="corrupt_file")
    emit("no_config", Q, "adapter_config.json absent", A, raw=lambda d: os.remove(os.path.join(d, "adapter_config.json")), category="missing_file")
    emit("no_weights", Q, "adapter_model.safetensors absent", A, raw=lambda d: os.remove(os.path.join(d, "adapter_model.safetensors")), category="missing_file")
    emit("no_tensors", Q, "a valid safetensors file without tensors", A, sd_edit=lambda sd: {"x": torch.zeros(1)}, category="unknown_target")
    # for another base model: an ordinary llama adapter, offered to this base
    emit("other_base_model", "llama", "adapter of another base model", A, category="shape")
    index["other_base_model"]["model"] = Q
    if base == "qwen3_moe":                         # these have gpt_oss as their base
        # fused experts
        emit("fused_rows_not_divisible", G, "rows of the fused lora_A are not a multiple of the expert count", FU, sd_edit=setk(kf, lambda t: t[:-1]), category="shape")
        emit("fused_wrong_out", G, "fused lora_B output size differs", FU, sd_edit=setk(kfb, lambda t: t[:-4]), category="shape")
        emit("fused_missing_b", G, "fused lora_A without lora_B", FU, sd_edit=pop(kfb), category="missing_tensor")
        emit("fused_nan", G, "a NaN in a fused lora_B", FU, sd_edit=poke(kfb, float("nan")), category="non_finite")
        emit("fused_bad_parameter", G, "target_parameters names a parameter the model does not have", FU,
             cfg_edit=lambda c: c.update(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.nope_proj"]), category="unknown_target")
        # written by PEFT itself: DoRA and bias="all"
        for nm, kw, cat, why in (("dora", dict(use_dora=True), "unsupported", "DoRA (lora_magnitude_vector)"),
                            ("bias_all", dict(bias="all"), "unsupported", 'bias="all": trained base biases in the file'),
                            ("lora_bias", dict(lora_bias=True), "unsupported", "lora_bias: lora_B has a bias")):
            d = os.path.join(bdir, nm)
            m = get_peft_model(load_model(os.path.join(out, "models", G)), LoraConfig(
                task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], base_model_name_or_path=f"golden/{G}", **kw))
            m.peft_config["default"].base_model_name_or_path = f"golden/{G}"
            m.save_pretrained(d)
            if os.path.exists(os.path.join(d, "README.md")):
                os.remove(os.path.join(d, "README.md"))
            fn = os.path.join(d, "adapter_model.safetensors")
            sd = {k: v if "magnitude" in k else rnd(gen, v.shape, 0.3) for k, v in sorted(load_file(fn).items())}
            save_file(sd, fn, metadata={"format": "pt"})
            ac = json.load(open(os.path.join(d, "adapter_config.json")))
            ac["target_modules"] = sorted(ac["target_modules"])
            json.dump(ac, open(os.path.join(d, "adapter_config.json"), "w"), indent=2, sort_keys=True)
            index[nm] = {"model": G, "category": cat, "reason": why}
    for nm, e in index.items():                     # for information: what PEFT itself does with the adapter
        try:
            _, msgs = load_with_adapter(os.path.join(out, "models", e["model"]), os.path.join(bdir, nm))
            e["peft_behaviour"] = "loads with a warning about missing or unexpected keys" if msgs else "loads silently"
        except Exception as ex:                     # noqa: BLE001
            e["peft_behaviour"] = f"raises {type(ex).__name__}"
    json.dump(index, open(os.path.join(bdir, "index.json"), "w"), indent=1, sort_keys=True)
    return len(index)


# --------------------------------------------------------------------------------------------------------------
def write_manifest(out, seed):
    man = {"format": 1, "seed": seed if seed is not None else None,
           "versions": {"python": sys.version.split()[0], "torch": torch.__version__.split("+")[0],
                        "transformers": transformers.__version__, "peft": peft.__version__}, "models": {}}
    edir = os.path.join(out, "expected")
    for name in sorted(os.listdir(edir)):
        ents = {}
        for fn in sorted(os.listdir(os.path.join(edir, name))):
            if fn.endswith(".json") and fn != "mixed_batch.json":
                m = json.load(open(os.path.join(edir, name, fn)))
                ents[fn[:-5]] = {k: m[k] for k in ("golden_source", "layout", "adapter_dtype", "peft_vs_numpy_merge_max_abs",
                                                   "argmax_changed_fraction", "peft_note") if k in m}
        cfg = json.load(open(os.path.join(out, "models", name, "config.json")))
        man["models"][name] = {"model_type": cfg["model_type"], "path": f"models/{name}", "runs": ents}
    json.dump(man, open(os.path.join(out, "manifest.json"), "w"), indent=1)


def verify(out, only, tol=2e-4, native=False, skip=None):
    """Fresh-process check: reload every model and adapter from disk, compare the logits with the stored ones."""
    man = json.load(open(os.path.join(out, "manifest.json")))
    params = json.load(open(os.path.join(out, "params_used.json")))
    bad = n = skipped = 0
    for name, m in man["models"].items():
        if only and name not in only:
            continue
        mdir = os.path.join(out, m["path"])
        for r, info in m["runs"].items():
            exp = load_file(os.path.join(out, "expected", name, f"{r}.safetensors"))
            meta = json.load(open(os.path.join(out, "expected", name, f"{r}.json")))
            try:
                if native and skip and skip(name, r, info):
                    print(f"skip {name}/{r}: {skip(name, r, info)}")
                    skipped += 1
                    continue
                if r == "base":
                    mod = load_model(mdir)
                elif info["golden_source"] == "merged" and not native:
                    sd = read_checkpoint(mdir)
                    sd = dequant_mxfp4_sd(sd) if any(k.endswith("_blocks") for k in sd) else sd
                    mod = load_model_sd(mdir, numpy_merge(name, params["models"][name], sd, os.path.join(out, "adapters", name, r)))
                else:
                    mod, _ = load_with_adapter(mdir, os.path.join(out, "adapters", name, r))
            except Exception as e:                                # noqa: BLE001
                print(f"SKIP {name}/{r}: {type(e).__name__}: {str(e)[:110]}")
                skipped += 1
                continue
            worst, gok = 0.0, True
            for pn, pm in meta["prompts"].items():
                ids = exp[f"{pn}.input_ids"]
                g = exp[f"{pn}.greedy_ids"]
                lg = logits_of(mod, torch.cat([ids, g]))
                ref = exp[f"{pn}.logits"]
                worst = max(worst, (lg[pm["logits_start"]:len(ids)] - ref).abs().max().item())
                gok &= bool((lg[len(ids) - 1:-1].argmax(-1) == g).all())
            ok = worst < tol and gok
            n += 1
            bad += not ok
            print(f"{'ok  ' if ok else 'DIFF'} {name}/{r} max|dlogit|={worst:.2e} greedy={'same' if gok else 'DIFFERENT'}"
                  + (f"   [golden_source={info['golden_source']}]" if info["golden_source"] == "merged" else ""))
    print(f"{n - bad} passed, {bad} failed, {skipped} skipped")
    return bad


def merge_params(base, over):
    out = copy.deepcopy(base)
    for k, v in (over or {}).items():
        out[k] = merge_params(out[k], v) if isinstance(v, dict) and isinstance(out.get(k), dict) else v
    return out


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", required=True)
    ap.add_argument("--seed", type=int, default=20261130)
    ap.add_argument("--params", help="JSON with overrides of DEFAULTS")
    ap.add_argument("--only", default="")
    ap.add_argument("--verify", action="store_true")
    ap.add_argument("--threads", type=int, default=1)
    a = ap.parse_args()
    torch.set_num_threads(a.threads)
    only = [x for x in a.only.split(",") if x]
    if a.verify:
        sys.exit(1 if verify(a.out, only) else 0)
    assert V5, "generate with transformers 5"
    over = json.load(open(a.params)) if a.params else {}
    params = merge_params(DEFAULTS, over)
    os.makedirs(a.out, exist_ok=True)
    tokdir = os.path.join(a.out, "tokenizer")
    tok = make_tokenizer(tokdir, params["tokenizer"]["vocab_size"])
    tokenizer_golden(tokdir, os.path.join(a.out, "tokenizer_golden.json"))
    for name in params["models"]:
        if name in params.get("skip_models", []):
            continue
        if only and name not in only and not (only == ["bad"]):
            continue
        if only == ["bad"]:
            break
        print(f"[{name}]", flush=True)
        build_model_set(name, params, a.out, tok, tokdir, a.seed, lambda s: print(s, flush=True))
    if not only or "bad" in only:
        print(f"bad adapters: {make_bad(a.out, params, a.seed)}")
        print(f"bad adapters on gpt_oss: {make_bad(a.out, params, a.seed, base='gpt_oss')}")
    json.dump({"seed": a.seed, **params}, open(os.path.join(a.out, "params_used.json"), "w"), indent=1)
    write_manifest(a.out, a.seed)
    for root, _, files in os.walk(a.out):
        for fn in files:
            os.chmod(os.path.join(root, fn), 0o644)


if __name__ == "__main__":
    main()
