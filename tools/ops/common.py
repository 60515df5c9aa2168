"""What the stored op cases share: seeded inputs, clear choices, adapter slices and deltas."""
import torch

# A choice (top-k, argmax) in a case is never closer than this, so rounding cannot turn it.
MARGIN = 1e-3


class Draw:
    """Seeded inputs; every real value is exactly a bfloat16, so any compute type can take it unrounded."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape, std=1.0):
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64) * std
        return values.to(torch.bfloat16).double()

    def uniform(self, *shape, low, high):
        values = torch.rand(shape, generator=self.generator, dtype=torch.float64) * (high - low) + low
        return values.to(torch.bfloat16).double()

    def integers(self, *shape, below):
        return torch.randint(below, shape, generator=self.generator)


def ids(*values):
    return torch.tensor(values, dtype=torch.int64)


def clear_choice(scores, k):
    """Fails unless the k best of each row, and their order, are clear."""
    best = scores.sort(dim=-1, descending=True).values
    gaps = best[..., :k] - best[..., 1 : k + 1]
    assert gaps.min() > MARGIN, f"a near tie ({gaps.min():.2e}): change the seed"


def slice_of(offset, stride, count):
    return dict(out_offset=offset, out_stride=stride, len=count)


def rows_of(part):
    """Indices of the outputs that a slice covers."""
    return part["out_offset"] + part["out_stride"] * torch.arange(part["len"])


def merged(weight, part, delta, a, b):
    """The weight with one delta added to the rows of its slice: LoRA by its definition, W + s·B·A."""
    return weight.index_add(0, rows_of(part), delta["scale"] * (b @ a))
