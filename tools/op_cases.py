#!/usr/bin/env python3
"""Stored cases for the op oracle: tests/golden/ops/<op>.safetensors, computed with torch in float64.

tests/golden/ops/README.md describes every tensor and scalar; this script is the other half of that page. Each function
in tools/ops gives the cases of one op from its formula, with torch's own functions where torch has one.

    python tools/op_cases.py            write tests/golden/ops
    python tools/op_cases.py --check    recompute and compare with the files, and hold the expert, routing and attention
                                        cases to the modules of transformers' gpt_oss; writes nothing
"""
import argparse
import json
import pathlib
import sys

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ops import attention, experts, head, products, rows
from ops.common import Draw

OPS = pathlib.Path(__file__).resolve().parent.parent / "tests" / "golden" / "ops"
# Chosen so that no case has a near tie.
SEED = 16
CASES = [
    rows.embed,
    rows.write_tokens,
    rows.gather_rows,
    rows.kv_write,
    rows.copy_blocks,
    rows.rms_norm,
    rows.rope,
    attention.paged_attention,
    products.linear,
    products.lora_linear,
    products.swiglu,
    experts.moe_route,
    experts.fused_moe,
    experts.fused_moe_lora,
    head.sample,
    head.logprobs,
]


def build(op):
    """Tensors and metadata of one op's file. The seed depends on the op alone, so ops can be added anywhere."""
    cases = op(Draw(sum(op.__name__.encode()) * 1000 + SEED))
    tensors, metadata = {}, {"op": op.__name__, "cases": json.dumps(list(cases))}
    for name, (scalars, values) in cases.items():
        metadata[name] = json.dumps(scalars)
        for key, value in values.items():
            assert value.dtype in (torch.float64, torch.int64), (op.__name__, name, key, value.dtype)
            tensors[f"{name}.{key}"] = value.contiguous().clone()
    return tensors, metadata


def differences(path, tensors, metadata):
    """What a stored file has otherwise than a fresh computation."""
    with safe_open(path, "pt") as stored:
        if stored.metadata() != metadata:
            yield "metadata"
        if set(stored.keys()) != set(tensors):
            yield "tensor names"
            return
        for name, value in tensors.items():
            old = stored.get_tensor(name)
            same = old.dtype == value.dtype and old.shape == value.shape
            if not same or not torch.allclose(old, value, rtol=1e-12, atol=1e-12):
                yield name


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the files instead of writing them")
    check = parser.parse_args().check
    OPS.mkdir(parents=True, exist_ok=True)
    failed = False
    for op in CASES:
        tensors, metadata = build(op)
        path = OPS / f"{op.__name__}.safetensors"
        if check:
            wrong = list(differences(path, tensors, metadata))
            failed |= bool(wrong)
            print(f"{op.__name__}: {'differs in ' + ', '.join(wrong) if wrong else 'as stored'}")
        else:
            save_file(tensors, path, metadata=metadata)
            print(f"{op.__name__}: {len(tensors)} tensors, {path.stat().st_size} bytes")
    if check:
        from ops import crosscheck

        failed |= not crosscheck.run(OPS)
    sys.exit(failed)


if __name__ == "__main__":
    main()
