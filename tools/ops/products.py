"""Cases of the dense products, with and without adapters, and of the activation between them."""
import torch
import torch.nn.functional as F

from .common import ids, merged, slice_of

# gpt_oss has alpha 1.702; here it is the float32 next to that.
LIMIT, ALPHA = 1.25, float(torch.tensor(1.702))


def linear(d):
    x, weight, bias = d.normal(5, 9), d.normal(7, 9), d.normal(7)
    return {
        "plain": ({}, dict(x=x, weight=weight, out=F.linear(x, weight))),
        "bias": ({}, dict(x=x, weight=weight, bias=bias, out=F.linear(x, weight, bias))),
    }


def lora_linear(d):
    def case(outputs, slices, deltas, slots):
        inner, tokens = 9, len(slots)
        x, weight, bias = d.normal(tokens, inner), d.normal(outputs, inner), d.normal(outputs)
        factors = [(d.normal(e["rank"], inner), d.normal(slices[e["slice"]]["len"], e["rank"])) for e in deltas]
        out = torch.empty(tokens, outputs, dtype=torch.float64)
        for t, slot in enumerate(slots.tolist()):
            full = weight
            for delta, (a, b) in zip(deltas, factors):
                if delta["slot"] == slot:
                    full = merged(full, slices[delta["slice"]], delta, a, b)
            out[t] = F.linear(x[t], full, bias)
        tensors = dict(x=x, weight=weight, bias=bias, slots=slots)
        for i, (a, b) in enumerate(factors):
            tensors |= {f"delta.{i}.a": a, f"delta.{i}.b": b}
        return dict(slices=slices, deltas=deltas), tensors | dict(out=out)

    entry = lambda slot, part, rank, scale: dict(slot=slot, slice=part, rank=rank, scale=scale)
    qkv = [slice_of(0, 1, 8), slice_of(8, 1, 4), slice_of(12, 1, 4)]
    gate_up = [slice_of(0, 2, 6), slice_of(1, 2, 6)]
    return {
        "qkv": case(
            16,
            qkv,
            [entry(0, 0, 3, 2.0), entry(0, 2, 3, 2.0), entry(2, 0, 5, 0.75), entry(2, 1, 2, 1.5), entry(2, 2, 5, 0.75)],
            ids(2, 0, -1, 2, 0, 2),
        ),
        "strided": case(
            12, gate_up, [entry(0, 1, 3, 0.5), entry(2, 0, 5, 1.25), entry(2, 1, 2, 3.0)], ids(0, -1, 2, 0)
        ),
    }


def clamped_swiglu(gate, up, limit, alpha):
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def swiglu(d):
    gate, up = d.normal(4, 6, std=2.0), d.normal(4, 6, std=2.0)
    return {
        "plain": ({}, dict(gate=gate, up=up, out=F.silu(gate) * up)),
        "clamped": (
            dict(limit=LIMIT, alpha=ALPHA),
            dict(gate=gate, up=up, out=clamped_swiglu(gate, up, LIMIT, ALPHA)),
        ),
    }
