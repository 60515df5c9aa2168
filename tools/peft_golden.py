#!/usr/bin/env python3
"""What transformers and PEFT compute for given tokens, in the file format of `amphora score`.

    python tools/peft_golden.py --model DIR [--adapter NAME=DIR]... --input FILE.jsonl --output FILE.safetensors
                                [--dtype f32|bf16]

Each input line is {"id": ID, "adapter": null or NAME, "tokens": [...], "max_new_tokens": N}. The output has, for each line,
ID.logits f32 [T, V] of every prompt position, ID.greedy_ids i64 [N] (end of sequence ignored) and ID.greedy_logprobs f32 [N].
`amphora score --compare A B` tells how two such files differ.

Attention and experts are transformers' eager ones, each line runs alone, on the CPU, without a cache. MXFP4 experts are
dequantized. PEFT loads an adapter with missing or unexpected tensors with no more than a warning: here that is an error.
"""
import argparse
import json
import os
import pathlib
import sys
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
import transformers
from peft import PeftModel
from safetensors.torch import save_file

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def load_base(folder, dtype):
    """The model of a folder, its weights brought to `dtype`."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(folder)
    options = {}
    if getattr(config, "quantization_config", None):
        options["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager", **options
    ).eval()


class Models:
    """The base, and one PEFT model per adapter, made when first asked for.

    An adapter gets a base of its own: PEFT leaves wrappers in the model it is given, and two adapters on the
    same expert parameters are a case that it does not support.
    """

    def __init__(self, folder, adapters, dtype):
        self.folder, self.adapters, self.dtype = folder, adapters, dtype
        self.loaded = {}

    def get(self, adapter):
        if adapter not in self.loaded:
            self.loaded[adapter] = self.load(adapter)
        return self.loaded[adapter]

    def load(self, adapter):
        base = load_base(self.folder, self.dtype)
        if adapter is None:
            return base
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = PeftModel.from_pretrained(base, self.adapters[adapter], autocast_adapter_dtype=False)
        for warning in caught:
            text = str(warning.message)
            if "missing" in text.lower() or "unexpected" in text.lower():
                raise SystemExit(f"adapter {adapter}: {text}")
        return model.to(self.dtype).eval()


def logits_of(model, tokens):
    """f32 [T, V] for a list of token ids."""
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()


def score(model, line):
    """The three tensors of one input line."""
    tokens = list(line["tokens"])
    prompt = logits_of(model, tokens)
    step, ids, logprobs = prompt[-1], [], []
    for _ in range(line["max_new_tokens"]):
        best = torch.log_softmax(step, -1).max(-1)
        ids.append(int(best.indices))
        logprobs.append(float(best.values))
        if len(ids) < line["max_new_tokens"]:
            step = logits_of(model, tokens + ids)[-1]
    return {
        "logits": prompt.contiguous(),
        "greedy_ids": torch.tensor(ids, dtype=torch.int64),
        "greedy_logprobs": torch.tensor(logprobs, dtype=torch.float32),
    }


def read_lines(path, adapters):
    """The input lines, checked, so that a mistake is told before the models are loaded."""
    lines, seen = [], set()
    for number, text in enumerate(path.read_text().splitlines(), 1):
        if not text.strip():
            continue
        where = f"{path}:{number}"
        try:
            line = json.loads(text)
            name, adapter, tokens, count = (line[k] for k in ("id", "adapter", "tokens", "max_new_tokens"))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise SystemExit(f"{where}: expected an object with id, adapter, tokens, max_new_tokens ({error!r})")
        if name in seen:
            raise SystemExit(f"{where}: id {name!r} occurs twice")
        if adapter is not None and adapter not in adapters:
            raise SystemExit(f"{where}: adapter {adapter!r} is not given with --adapter")
        if not tokens or count < 0:
            raise SystemExit(f"{where}: tokens must not be empty, max_new_tokens not negative")
        seen.add(name)
        lines.append(line)
    return lines


def named_folder(text):
    name, separator, folder = text.partition("=")
    if not (name and separator and folder):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=DIR")
    return name, folder


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument("--adapter", action="append", default=[], type=named_folder, metavar="NAME=DIR")
    parser.add_argument("--input", required=True, type=pathlib.Path, metavar="FILE.jsonl")
    parser.add_argument("--output", required=True, type=pathlib.Path, metavar="FILE.safetensors")
    parser.add_argument("--dtype", choices=DTYPES, default="f32")
    options = parser.parse_args()
    torch.set_grad_enabled(False)

    adapters = dict(options.adapter)
    lines = read_lines(options.input, adapters)
    models = Models(options.model, adapters, DTYPES[options.dtype])
    tensors = {}
    for line in lines:
        for name, value in score(models.get(line["adapter"]), line).items():
            tensors[f"{line['id']}.{name}"] = value
        print(f"{line['id']}: {len(line['tokens'])} tokens, adapter {line['adapter']}", file=sys.stderr)
    save_file(tensors, options.output, metadata={"dtype": options.dtype, "by": "transformers, peft"})


if __name__ == "__main__":
    main()
