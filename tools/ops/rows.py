"""Cases of the ops that move rows, normalise and rotate."""
import torch
import torch.nn.functional as F

from .common import ids


def embed(d):
    table, tokens, index = d.normal(11, 6), d.integers(9, below=11), ids(4, 0, 8, 4, 7)
    out = F.embedding(tokens[index], table)
    return {"basic": ({}, dict(table=table, token_table=tokens, token_index=index, out=out))}


def write_tokens(d):
    max_seqs, max_tokens = 3, 6
    before, prompt = d.integers(max_seqs + max_tokens, below=50), d.integers(4, below=50)
    out = torch.cat([before[:max_seqs], prompt, before[max_seqs + len(prompt) :]])
    scalars = dict(max_seqs=max_seqs, max_tokens=max_tokens)
    return {"basic": (scalars, dict(token_table=before, prompt_tokens=prompt, out=out))}


def gather_rows(d):
    x, rows = d.normal(7, 5), ids(6, 0, 3, 3)
    return {"basic": ({}, dict(x=x, rows=rows, out=x.index_select(0, rows)))}


def kv_write(d):
    blocks, size, heads, dim = 4, 4, 2, 6
    k, v = d.normal(5, heads, dim), d.normal(5, heads, dim)
    caches = d.normal(2, blocks, size, heads, dim)
    index = ids(9, 10, 3, -1, 12)
    written = index >= 0
    out = []
    for cache, rows in zip(caches, (k, v)):
        flat = cache.reshape(blocks * size, heads, dim).index_copy(0, index[written], rows[written])
        out.append(flat.reshape(cache.shape))
    tensors = dict(k=k, v=v, k_cache=caches[0], v_cache=caches[1], kv_index=index, k_out=out[0], v_out=out[1])
    return {"basic": ({}, tensors)}


def copy_blocks(d):
    k, v = d.normal(5, 4, 2, 3), d.normal(5, 4, 2, 3)
    pairs = ids(0, 3, 2, 4).reshape(2, 2)
    out = [c.index_copy(0, pairs[:, 1], c[pairs[:, 0]]) for c in (k, v)]
    return {"basic": ({}, dict(k_cache=k, v_cache=v, pairs=pairs, k_out=out[0], v_out=out[1]))}


def rms_norm(d):
    eps = 2.0**-16
    x, weight, residual = d.normal(4, 10), d.normal(10) + 1, d.normal(4, 10)
    weight = weight.to(torch.bfloat16).double()
    total = x + residual
    norm = lambda y: F.rms_norm(y, (10,), weight, eps)
    return {
        "plain": (dict(eps=eps), dict(x=x, weight=weight, out=norm(x))),
        "residual": (
            dict(eps=eps),
            dict(x=x, weight=weight, residual=residual, residual_out=total, out=norm(total)),
        ),
    }


def rope(d):
    """Rotation as a product of complex numbers, which is neither of the ways a kernel does it."""
    tokens, heads, kv_heads, dim = 5, 3, 2, 12
    positions = ids(0, 1, 7, 63, 200)

    def turn(x, angles, factor, pairing):
        rotary = 2 * angles.shape[-1]
        turned, rest = x[..., :rotary], x[..., rotary:]
        if pairing == "interleaved":
            pairs = turned.unflatten(-1, (rotary // 2, 2))
        else:
            pairs = turned.unflatten(-1, (2, rotary // 2)).transpose(-1, -2)
        unit = torch.polar(torch.full_like(angles, factor), angles)[:, None, :]
        out = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * unit)
        if pairing == "half":
            out = out.transpose(-1, -2)
        return torch.cat([out.flatten(-2), rest], -1)

    def case(pairing, rotary, factor=1.0, q_scale=None):
        q, k = d.normal(tokens, heads, dim), d.normal(tokens, kv_heads, dim)
        inv_freq = (150000.0 ** (-torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)).float().double()
        angles = positions[:, None] * inv_freq
        out_q, out_k = turn(q, angles, factor, pairing), turn(k, angles, factor, pairing)
        tensors = dict(q=q, k=k, positions=positions, inv_freq=inv_freq)
        if q_scale is not None:
            out_q = out_q * q_scale[:, None, None]
            tensors["q_scale"] = q_scale
        tensors |= dict(out_q=out_q, out_k=out_k)
        return dict(pairing=pairing, rotary_dim=rotary, attention_factor=factor), tensors

    return {
        "half": case("half", dim),
        "interleaved": case("interleaved", dim),
        "partial": case("half", 8),
        "yarn_q_scale": case("half", dim, 1.375, d.uniform(tokens, low=1.0, high=1.5)),
    }
