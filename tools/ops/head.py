"""Cases of what follows the head: choosing tokens and log-probabilities."""
import torch
import torch.nn.functional as F

from .common import MARGIN, clear_choice, ids


def sample(d):
    logits = d.normal(4, 13, std=2.0)
    clear_choice(logits, 1)
    tokens = logits.argmax(-1)
    logprobs = F.log_softmax(logits, -1).gather(-1, tokens[:, None])[:, 0]
    temperature = torch.tensor([1.0, 0.5, 2.0, 1.25], dtype=torch.float64)
    top_k, top_p = ids(0, 4, 6, 0), torch.tensor([1.0, 1.0, 0.75, 0.5], dtype=torch.float64)
    probs = torch.zeros_like(logits)
    for s in range(4):
        p, order = (logits[s] / temperature[s]).softmax(-1).sort(descending=True)
        if top_k[s] > 0:
            assert p[top_k[s] - 1] - p[top_k[s]] > MARGIN
            p = p[: top_k[s]] / p[: top_k[s]].sum()
        before = p.cumsum(-1) - p
        assert (before - top_p[s]).abs().min() > MARGIN
        p = p[before < top_p[s]]
        probs[s, order[: len(p)]] = p / p.sum()
    return {
        "greedy": ({}, dict(logits=logits, tokens=tokens, logprobs=logprobs)),
        "filtered": ({}, dict(logits=logits, temperature=temperature, top_k=top_k, top_p=top_p, probs=probs)),
    }


def logprobs(d):
    top = 3
    logits, targets = d.normal(4, 13, std=2.0), ids(5, 0, 12, 7)
    clear_choice(logits, top)
    all_logprobs = F.log_softmax(logits, -1)
    best = all_logprobs.topk(top, dim=-1)
    target = all_logprobs.gather(-1, targets[:, None])[:, 0]
    tensors = dict(logits=logits, targets=targets, target_logprobs=target)
    return {"basic": (dict(top=top), tensors | dict(top_ids=best.indices, top_logprobs=best.values))}
