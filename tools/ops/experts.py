"""Cases of routing and of the expert layer, with and without adapters."""
import torch
import torch.nn.functional as F

from .common import clear_choice, ids, merged, slice_of
from .products import ALPHA, LIMIT, clamped_swiglu


def route(logits, top_k, score, correction=None, groups=None, renorm=False, scale=1.0):
    """Chosen experts, in order of choice, and their weights."""
    scores = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid(), "softmax_topk": logits}[score]
    choosing = scores if correction is None else scores + correction
    if groups:
        runs = choosing.unflatten(-1, (groups["count"], -1))
        best = runs.amax(-1) if groups["score"] == "max" else runs.topk(2, dim=-1).values.sum(-1)
        clear_choice(best, groups["keep"])
        keep = torch.zeros_like(best).scatter(-1, best.topk(groups["keep"], dim=-1).indices, 1.0).bool()
        choosing = runs.masked_fill(~keep[..., None], float("-inf")).flatten(-2)
        clear_choice(choosing.masked_fill(choosing.isinf(), -1e9), top_k)
    else:
        clear_choice(choosing, top_k)
    experts = choosing.topk(top_k, dim=-1).indices
    weights = scores.gather(-1, experts)
    if score == "softmax_topk":
        weights = weights.softmax(-1)
    if renorm:
        weights = weights / weights.sum(-1, keepdim=True)
    return experts, weights * scale


def moe_route(d):
    def case(experts, top_k, score, with_correction=False, padding=(), **options):
        slots = ids(0, -1, 2, 0, 2, -1, 1)
        live = ids(*(-1 if t in padding else t for t in range(len(slots))))
        logits = d.normal(len(slots), experts, std=1.5)
        correction = d.uniform(experts, low=0.0, high=0.5) if with_correction else None
        chosen, weights = route(logits, top_k, score, correction, **options)
        pairs = [p for p in range(len(slots) * top_k) if live[p // top_k] >= 0]
        last = int(slots.max()) + 1
        key = lambda p: (int(chosen.flatten()[p]), int(slots[p // top_k]) if slots[p // top_k] >= 0 else last)
        order = sorted(pairs, key=key)
        order += [-1] * (len(slots) * top_k - len(order))
        chosen[live < 0], weights[live < 0] = -1, 0.0
        scalars = dict(top_k=top_k, score=score, renorm=False, scale=1.0, groups=None) | options
        tensors = dict(logits=logits, slots=slots, live=live)
        if with_correction:
            tensors["correction"] = correction
        tensors |= dict(experts=chosen, weights=weights, sorted_pairs=ids(*order))
        return scalars, tensors

    return {
        "softmax_topk": case(8, 3, "softmax_topk"),
        "softmax_renorm": case(6, 2, "softmax", renorm=True),
        "softmax_scaled": case(6, 2, "softmax", scale=2.5),
        "softmax_group_max": case(8, 2, "softmax", groups=dict(count=4, keep=2, score="max"), scale=16.0),
        "sigmoid_groups": case(
            8, 3, "sigmoid", True, groups=dict(count=4, keep=2, score="top2_sum"), renorm=True, scale=2.5
        ),
        "padding": case(5, 2, "softmax_topk", padding=(2, 6)),
    }


def expert_shapes(d, tokens, experts, top_k, hidden, inter):
    """Inputs that every expert case has; each token visits different experts."""
    chosen = torch.stack([torch.randperm(experts, generator=d.generator)[:top_k] for _ in range(tokens)])
    return dict(
        x=d.normal(tokens, hidden),
        experts=chosen,
        weights=d.uniform(tokens, top_k, low=0.1, high=0.9),
        gate_up=d.normal(experts, 2 * inter, hidden, std=0.5),
        down=d.normal(experts, hidden, inter, std=0.5),
    )


def activate(h, activation):
    if activation["activation"] == "swiglu":
        gate, up = h.chunk(2, -1)
        return F.silu(gate) * up
    return clamped_swiglu(h[..., 0::2], h[..., 1::2], activation["limit"], activation["alpha"])


def one_expert(x, gate_up, down, biases, activation):
    h = activate(F.linear(x, gate_up, biases[0]), activation)
    return F.linear(h, down, biases[1])


CLAMPED = dict(activation="clamped_interleaved", limit=LIMIT, alpha=ALPHA)
PLAIN = dict(activation="swiglu")


def fused_moe(d):
    def case(activation, with_biases=False, weight_on="output", accumulate=False):
        tensors = expert_shapes(d, tokens=6, experts=5, top_k=2, hidden=8, inter=6)
        if with_biases:
            tensors |= dict(gate_up_bias=d.normal(5, 12), down_bias=d.normal(5, 8))
        out = torch.zeros(6, 8, dtype=torch.float64)
        if accumulate:
            out = tensors["out_before"] = d.normal(6, 8)
        out = out.clone()
        for t in range(6):
            for e, w in zip(tensors["experts"][t].tolist(), tensors["weights"][t]):
                biases = (tensors["gate_up_bias"][e], tensors["down_bias"][e]) if with_biases else (None, None)
                x = tensors["x"][t] * (w if weight_on == "input" else 1.0)
                y = one_expert(x, tensors["gate_up"][e], tensors["down"][e], biases, activation)
                out[t] += y * (w if weight_on == "output" else 1.0)
        return activation | dict(weight_on=weight_on, accumulate=accumulate), tensors | dict(out=out)

    return {
        "clamped_interleaved": case(CLAMPED, with_biases=True),
        "swiglu": case(PLAIN),
        "input_weight_accumulate": case(PLAIN, weight_on="input", accumulate=True),
    }


def fused_moe_lora(d):
    experts, hidden, inter, tokens = 4, 8, 6, 7

    def case(activation, with_biases, gate_up_slices):
        slices = dict(gate_up=gate_up_slices, down=[slice_of(0, 1, hidden)])
        inputs = dict(gate_up=hidden, down=inter)
        slots = ids(2, 0, -1, 0, 2, 2, -1)
        tensors = expert_shapes(d, tokens, experts, 2, hidden, inter) | dict(slots=slots)
        if with_biases:
            tensors |= dict(gate_up_bias=d.normal(experts, 2 * inter), down_bias=d.normal(experts, hidden))
        deltas = []
        for slot, touched, rank, scale in ((0, range(experts), 3, 0.5), (2, (1, 2), 5, 1.25)):
            for e in touched:
                for projection, parts in slices.items():
                    if (slot, e, projection) == (2, 2, "down"):
                        continue
                    for i in range(len(parts)):
                        deltas.append(
                            dict(slot=slot, projection=projection, slice=i, expert=e, rank=rank, scale=scale)
                        )
        for i, delta in enumerate(deltas):
            part = slices[delta["projection"]][delta["slice"]]
            tensors[f"delta.{i}.a"] = d.normal(delta["rank"], inputs[delta["projection"]], std=0.5)
            tensors[f"delta.{i}.b"] = d.normal(part["len"], delta["rank"], std=0.5)
        out = torch.zeros(tokens, hidden, dtype=torch.float64)
        for t in range(tokens):
            for e, w in zip(tensors["experts"][t].tolist(), tensors["weights"][t]):
                weights = dict(gate_up=tensors["gate_up"][e], down=tensors["down"][e])
                for i, delta in enumerate(deltas):
                    if (delta["slot"], delta["expert"]) == (int(slots[t]), e):
                        p = delta["projection"]
                        a, b = tensors[f"delta.{i}.a"], tensors[f"delta.{i}.b"]
                        weights[p] = merged(weights[p], slices[p][delta["slice"]], delta, a, b)
                biases = (tensors["gate_up_bias"][e], tensors["down_bias"][e]) if with_biases else (None, None)
                out[t] += w * one_expert(tensors["x"][t], weights["gate_up"], weights["down"], biases, activation)
        scalars = activation | dict(gate_up_slices=gate_up_slices, down_slices=slices["down"], deltas=deltas)
        return scalars, tensors | dict(out=out)

    return {
        "clamped_interleaved": case(CLAMPED, True, [slice_of(0, 2, inter), slice_of(1, 2, inter)]),
        "swiglu": case(PLAIN, False, [slice_of(0, 1, inter), slice_of(inter, 1, inter)]),
    }
