"""Holds stored op cases to the modules of transformers' gpt_oss, run in float64. Called by op_cases.py --check."""
import json

import torch
from safetensors import safe_open
from transformers import GptOssConfig
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss


class Case:
    """One case of a stored file: scalars as `case.s[...]`, tensors as `case[...]`."""

    def __init__(self, folder, op, name):
        self.file = safe_open(folder / f"{op}.safetensors", "pt")
        self.name = name
        self.s = json.loads(self.file.metadata()[name])

    def __getitem__(self, tensor):
        return self.file.get_tensor(f"{self.name}.{tensor}")


def experts(folder):
    case = Case(folder, "fused_moe", "clamped_interleaved")
    count, hidden, inter = case["down"].shape
    config = GptOssConfig(
        num_local_experts=count,
        hidden_size=hidden,
        intermediate_size=inter,
        swiglu_limit=case.s["limit"],
        swiglu_alpha=case.s["alpha"],
        experts_implementation="eager",
    )
    module = gpt_oss.GptOssExperts(config).double()
    module.gate_up_proj.data = case["gate_up"].transpose(1, 2)
    module.down_proj.data = case["down"].transpose(1, 2)
    module.gate_up_proj_bias.data = case["gate_up_bias"]
    module.down_proj_bias.data = case["down_bias"]
    return module(case["x"], case["experts"], case["weights"]), case["out"]


def routing(folder):
    case = Case(folder, "moe_route", "softmax_topk")
    logits = case["logits"]
    count = logits.shape[-1]
    config = GptOssConfig(num_local_experts=count, num_experts_per_tok=case.s["top_k"], hidden_size=count)
    router = gpt_oss.GptOssTopKRouter(config).double()
    router.weight.data = torch.eye(count, dtype=torch.float64)
    _, weights, chosen = router(logits)
    assert torch.equal(chosen, case["experts"])
    return weights, case["weights"]


def attention(folder):
    """The second sequence, whose queries are all its positions, through the module's own mask and sinks."""
    case = Case(folder, "paged_attention", "window_sinks")
    count, size = int(case["context_len"][1]), case.s["block_size"]
    places = [(int(case["block_table"][1, p // size]), p % size) for p in range(count)]
    k = torch.stack([case["k_cache"][place] for place in places]).transpose(0, 1)[None]
    v = torch.stack([case["v_cache"][place] for place in places]).transpose(0, 1)[None]
    q = case["q"][-count:].transpose(0, 1)[None]
    position = torch.arange(count)
    hidden = position[:, None] - position[None, :]
    mask = torch.zeros(count, count, dtype=torch.float64)
    mask[(hidden < 0) | (hidden >= case.s["window"])] = float("-inf")
    module = torch.nn.Module().eval()
    module.num_key_value_groups = q.shape[1] // k.shape[1]
    module.sinks = case["sinks"]
    out, _ = gpt_oss.eager_attention_forward(module, q, k, v, mask, case.s["scale"])
    return out[0], case["out"][-count:]


def rotation(folder):
    case = Case(folder, "rope", "yarn_q_scale")
    angles = case["positions"][:, None] * case["inv_freq"]
    factor = case.s["attention_factor"]
    q, k = (case[name].transpose(0, 1)[None] for name in ("q", "k"))
    q, k = gpt_oss.apply_rotary_pos_emb(q, k, angles.cos()[None] * factor, angles.sin()[None] * factor)
    return k[0].transpose(0, 1), case["out_k"]


@torch.no_grad()
def run(folder):
    """Compares each; prints one line each; true if all agree."""
    good = True
    for part in (experts, routing, attention, rotation):
        got, want = part(folder)
        error = float((got - want).abs().max())
        good &= error < 1e-12
        print(f"transformers {part.__name__}: largest difference {error:.1e}")
    return good
