"""Cases of attention over a paged cache."""
import torch

from .common import ids


def attend(q, k, v, scale, allowed, sinks):
    """Dense attention of one sequence; q [n, heads, d], k and v [c, kv_heads, d], allowed [n, c]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = torch.einsum("nhd,chd->hnc", q, k) * scale
    logits = logits.masked_fill(~allowed, float("-inf"))
    if sinks is not None:
        logits = torch.cat([logits, sinks[:, None, None].expand(-1, len(q), 1)], -1)
    probs = logits.softmax(-1)[..., : k.shape[0]]
    return torch.einsum("hnc,chd->nhd", probs, v)


def visible(queries, keys, mask, width):
    """Which keys [c] a query [n] sees, both given as positions."""
    seen = keys[None, :] <= queries[:, None]
    if mask == "window":
        seen &= keys[None, :] > queries[:, None] - width
    if mask == "chunk":
        seen &= keys[None, :] // width == queries[:, None] // width
    return seen


def paged_attention(d):
    heads, kv_heads, size, blocks = 4, 2, 4, 7
    context, q_start = ids(11, 6), ids(0, 3, 9)
    block_table = ids(5, 0, 3, 2, 6, -1).reshape(2, 3)

    def case(mask, width=None, with_sinks=False, qk_dim=8, v_dim=8):
        q = d.normal(9, heads, qk_dim)
        sinks = d.normal(heads) if with_sinks else None
        scale = 0.375
        caches = [torch.full((blocks, size, kv_heads, n), 1e4).to(torch.bfloat16).double() for n in (qk_dim, v_dim)]
        out = torch.empty(9, heads, v_dim, dtype=torch.float64)
        for s in range(2):
            count = int(context[s])
            k, v = d.normal(count, kv_heads, qk_dim), d.normal(count, kv_heads, v_dim)
            for position in range(count):
                block, offset = block_table[s, position // size], position % size
                caches[0][block, offset], caches[1][block, offset] = k[position], v[position]
            rows = slice(int(q_start[s]), int(q_start[s + 1]))
            keys = torch.arange(count)
            queries = keys[count - (rows.stop - rows.start) :]
            out[rows] = attend(q[rows], k, v, scale, visible(queries, keys, mask, width), sinks)
        scalars = dict(scale=scale, block_size=size, qk_dim=qk_dim, v_dim=v_dim, mask=mask)
        if width:
            scalars[mask] = width
        tensors = dict(q=q, k_cache=caches[0], v_cache=caches[1], block_table=block_table, q_start=q_start)
        tensors["context_len"] = context
        if with_sinks:
            tensors["sinks"] = sinks
        return scalars, tensors | dict(out=out)

    return {
        "causal": case("causal"),
        "window_sinks": case("window", width=4, with_sinks=True),
        "chunk": case("chunk", width=5),
        "narrow_values": case("causal", v_dim=5),
    }
