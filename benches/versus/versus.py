"""Amphora against transformers + PEFT: the same models, adapters and prompts, on the same threads, in turns.

    python benches/versus/versus.py [--rounds N] [--only demo|moe] [--markdown FILE]

Two models: the demo (gpt_oss, 2.5 M parameters, its own adapters) and a random qwen3_moe of about 300 M parameters
with four random LoRA adapters, both made here from a seed into a temporary folder. Prompts of 256 tokens, 64 new
ones, greedy, for 1 prompt and for 8 (adapters: the first of four; two prompts on each of four). Every round runs
both sides once, one after the other; the table has medians.

The other side runs as installed: eager kernels, `torch.inference_mode`, a dynamic cache, logits of the last position
only. It is given each of its ways and its best one counts, for prefill and decode apart:
  dtype     f32 or bf16;
  experts   every implementation of transformers that runs here (`batched_mm` copies its experts for each token, so it
            decodes behind a prefill by `grouped_mm`); on 8 prompts those that came near the best on one;
  adapters  `live` (as trained; a batch on several adapters goes through one `adapter_names` call where PEFT can
            mix, else adapter by adapter), or `merged` (adapter by adapter merged into the weights before and taken out after, the
            time of both counted as prefill), which serves nobody else meanwhile. The verdict is against the better of the two.
Amphora runs its release build through its engine (`main.rs` here), bf16 or f32, the better of the two alike.
"""

import os

THREADS = 2
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROMPT, NEW, SEED = 256, 64, 20261130
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
EXPERTS = ["eager", "batched_mm", "grouped_mm"]
# New tokens where ways are tried, not measured.
TRIAL = 4
# Seconds that the decode of one measurement may take; a slower way makes fewer tokens, at the same rate.
DECODE = 6.0
# A way is tried on 8 prompts if on one it came within this of the best.
NEAR = 2.0


@dataclass
class Subject:
    """A model folder with four adapters."""

    name: str
    folder: pathlib.Path
    adapters: dict[str, pathlib.Path]
    vocab: int


@dataclass
class Work:
    """Prompts put at once, each with its adapter or None."""

    label: str
    prompts: list[list[int]]
    adapters: list[str | None]


def demo() -> Subject:
    folder = ROOT / "assets/demo-model"
    names = ["json", "math", "pirate", "sql"]
    return Subject("demo", folder, {name: folder / "adapters" / name for name in names}, 2048)


def random_moe(into: pathlib.Path) -> Subject:
    """About 300 M parameters, a quarter of them used by a token; adapters on attention and experts."""
    torch.manual_seed(SEED)
    config = transformers.Qwen3MoeConfig(
        vocab_size=32000, hidden_size=768, intermediate_size=2048, moe_intermediate_size=256, num_hidden_layers=12,
        num_attention_heads=12, num_key_value_heads=4, head_dim=64, num_experts=32, num_experts_per_tok=4,
        norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], max_position_embeddings=2048,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0, use_cache=True,
        dtype="bfloat16",
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    print(f"qwen3_moe of {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters", file=sys.stderr)
    folder = into / "moe"
    model.save_pretrained(folder)
    adapters = {}
    for index in range(4):
        name = f"a{index}"
        lora = LoraConfig(
            r=16, lora_alpha=32, init_lora_weights=False, task_type="CAUSAL_LM",
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        )
        wrapped = get_peft_model(model, lora)
        with torch.no_grad():
            for key, value in wrapped.named_parameters():
                if "lora_" in key:
                    torch.nn.init.normal_(value, std=0.02)
        wrapped.save_pretrained(into / name)
        model = wrapped.unload()
        adapters[name] = into / name
    return Subject("moe", folder, adapters, config.vocab_size)


def works(subject: Subject) -> list[Work]:
    rng = torch.Generator().manual_seed(SEED)
    prompts = torch.randint(3, subject.vocab, (8, PROMPT), generator=rng).tolist()
    names = list(subject.adapters)
    return [
        Work("1, base", prompts[:1], [None]),
        Work("1, adapter", prompts[:1], names[:1]),
        Work("8, base", prompts, [None] * 8),
        Work("8, four adapters", prompts, [names[i % 4] for i in range(8)]),
    ]


@dataclass
class Times:
    """Seconds of the clock and of processors; tokens that decode made."""

    prefill: float = 0.0
    decode: float = 0.0
    prefill_cpu: float = 0.0
    decode_cpu: float = 0.0
    decoded: int = 0

    def add(self, other: "Times"):
        for field in vars(self):
            setattr(self, field, getattr(self, field) + getattr(other, field))


class Peft:
    """transformers + PEFT in one of its dtypes, any of its ways."""

    def __init__(self, subject: Subject, dtype: str):
        self.holders = {}
        for name, folder in subject.adapters.items():
            first = next(iter(self.holders.values()), None)
            try:
                if first is None:
                    raise ValueError("the first adapter wraps the model")
                first.load_adapter(folder, adapter_name=name)
                self.holders[name] = first
            except ValueError:
                # PEFT holds adapters on unlike expert weights in one model no more than none: a copy each.
                model = transformers.AutoModelForCausalLM.from_pretrained(subject.folder, dtype=DTYPES[dtype])
                self.holders[name] = PeftModel.from_pretrained(model, folder, adapter_name=name)
        for holder in self.holders.values():
            holder.eval()

    def run(self, work: Work, experts: str, way: str, new: int) -> Times:
        holders = list(self.holders.values())
        if all(adapter is None for adapter in work.adapters):
            with holders[0].disable_adapter():
                return generate(holders[0], work.prompts, {}, experts, new)
        names = sorted(set(work.adapters))
        if len(names) > 1 and way == "live" and all(holder is holders[0] for holder in holders):
            try:
                return generate(holders[0], work.prompts, {"adapter_names": work.adapters}, experts, new)
            except ValueError:
                pass  # Some layer cannot mix, which PEFT says before it computes.
        total = Times()
        for name in names:
            prompts = [prompt for prompt, of in zip(work.prompts, work.adapters) if of == name]
            total.add(self.group(name, prompts, way, experts, new))
        return total

    def group(self, name: str, prompts: list[list[int]], way: str, experts: str, new: int) -> Times:
        model = self.holders[name]
        model.set_adapter(name, inference_mode=True)
        if way == "live":
            return generate(model, prompts, {}, experts, new)
        begin, cpu = time.perf_counter(), time.process_time()
        model.merge_adapter()
        took, took_cpu = time.perf_counter() - begin, time.process_time() - cpu
        times = generate(model, prompts, {}, experts, new)
        begin, cpu = time.perf_counter(), time.process_time()
        model.unmerge_adapter()
        times.prefill += took + time.perf_counter() - begin
        times.prefill_cpu += took_cpu + time.process_time() - cpu
        return times


@torch.inference_mode()
def generate(model, prompts: list[list[int]], options: dict, experts: str, new: int) -> Times:
    """Prompts of one length, greedily, in one batch."""
    ids = torch.tensor(prompts)
    base = model.get_base_model()
    base.set_experts_implementation("grouped_mm" if experts == "batched_mm" else experts)
    cache = transformers.DynamicCache(config=model.config)
    begin, cpu_begin = time.perf_counter(), time.process_time()
    out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **options)
    token = out.logits[:, -1].argmax(-1, keepdim=True)
    first, cpu_first = time.perf_counter(), time.process_time()
    base.set_experts_implementation(experts)
    made = 0
    for _ in range(new - 1):
        out = model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1, **options)
        token = out.logits[:, -1].argmax(-1, keepdim=True)
        made += len(prompts)
    end, cpu_end = time.perf_counter(), time.process_time()
    return Times(first - begin, end - first, cpu_first - cpu_begin, cpu_end - cpu_first, made)


class Amphora:
    """The engine in a process of its own."""

    def __init__(self, subject: Subject, dtype: str, binary: pathlib.Path):
        adapters = [f"{name}={folder}" for name, folder in subject.adapters.items()]
        command = [binary, subject.folder, dtype, str(THREADS), *adapters]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self.process.stdout.readline().strip() != "ready":
            sys.exit(f"{binary} did not start")

    def run(self, work: Work) -> Times:
        line = json.dumps({"prompts": work.prompts, "adapters": work.adapters, "new": NEW})
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        answer.pop("ids")
        return Times(**answer)

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def measure(subject: Subject, binary: pathlib.Path, rounds: int) -> list[dict]:
    """A row for each work and phase."""
    ours = {dtype: Amphora(subject, dtype, binary) for dtype in DTYPES}
    theirs = {dtype: Peft(subject, dtype) for dtype in DTYPES}
    rows, near = [], {}
    for work in works(subject):
        kinds = ["base"] if work.adapters[0] is None else ["live", "merged"]
        every = [(dtype, experts, kind) for dtype in DTYPES for experts in EXPERTS for kind in kinds]
        tried = {}
        for dtype, experts, kind in every:
            if near.get(kind, {(dtype, experts)}) >= {(dtype, experts)}:
                try:
                    tried[dtype, experts, kind] = theirs[dtype].run(work, experts, kind, TRIAL)
                except (RuntimeError, NotImplementedError, ValueError) as error:
                    print(f"{subject.name} {work.label} {dtype} {experts}: {error}"[:150], file=sys.stderr)
        best = set()
        for kind in kinds:
            of_kind = {key: times for key, times in tried.items() if key[2] == kind}
            if not of_kind:
                continue  # A way that does not run here has been told above.
            for cost in (lambda times: times.prefill, lambda times: times.decode / times.decoded):
                least = min(cost(times) for times in of_kind.values())
                best |= {key for key, times in of_kind.items() if cost(times) == least}
                close = {key[:2] for key, times in of_kind.items() if cost(times) <= NEAR * least}
                near[kind] = near.get(kind, set()) | close
        runs = {("ours", dtype, ""): (lambda d=dtype: ours[d].run(work)) for dtype in DTYPES}
        for run in runs.values():
            run()
        for dtype, experts, kind in best:
            a_token = tried[dtype, experts, kind].decode / (TRIAL - 1)
            new = max(TRIAL, min(NEW, 1 + int(DECODE / a_token)))
            runs[dtype, experts, kind] = lambda d=dtype, e=experts, k=kind, n=new: theirs[d].run(work, e, k, n)
        times = {key: [] for key in runs}
        for _ in range(rounds):
            for key, run in runs.items():
                times[key].append(run())
        rows += [row(subject, work, phase, times) for phase in ("decode", "prefill")]
        print(line(rows[-2]), line(rows[-1]), sep="\n", file=sys.stderr, flush=True)
    for engine in ours.values():
        engine.close()
    return rows


def row(subject: Subject, work: Work, phase: str, times: dict) -> dict:
    """Tokens per second of the clock and of processors, medians of rounds, the best way of each kind."""

    def rates(clock: str) -> dict:
        found = {}
        for key, runs in times.items():
            tokens = [len(work.prompts) * PROMPT if phase == "prefill" else run.decoded for run in runs]
            rate = statistics.median(n / max(getattr(run, clock), 1e-9) for n, run in zip(tokens, runs))
            kind = "ours" if key[0] == "ours" else key[2]
            name = key[1] if kind == "ours" else f"{key[0]} {key[1]}"
            if kind not in found or rate > found[kind][0]:
                found[kind] = (rate, name)
        return found

    clock, cpu = rates(phase), rates(f"{phase}_cpu")
    rivals = [kind for kind in clock if kind != "ours"]
    return {
        "model": subject.name, "work": work.label, "phase": phase, "ours": clock["ours"],
        "rivals": {kind: clock[kind] for kind in rivals},
        "ratio": {kind: clock["ours"][0] / clock[kind][0] for kind in rivals},
        "cpu_ratio": {kind: cpu["ours"][0] / cpu[kind][0] for kind in rivals},
    }


# Least ratios, by model and phase.
WANTED = {("demo", "decode"): 2.0, ("demo", "prefill"): 2.0, ("moe", "decode"): 2.0, ("moe", "prefill"): 1.0}

HEADER = (
    "| model | prompts, adapters | phase | Amphora, tokens/s | transformers + PEFT, tokens/s | ratio "
    "| ratio by processor time | wanted | met |\n|---|---|---|---|---|---|---|---|---|"
)


def line(row: dict) -> str:
    wanted = WANTED[row["model"], row["phase"]]
    met = "yes" if min(row["ratio"].values()) >= wanted else "no"

    def each(values, show):
        return "; ".join(f"{show(value)} {kind}".replace(" base", "") for kind, value in sorted(values.items()))

    rate, dtype = row["ours"]
    return (
        f"| {row['model']} | {row['work']} | {row['phase']} | {rate:.0f} ({dtype}) "
        f"| {each(row['rivals'], lambda v: f'{v[0]:.0f} ({v[1]})')} | {each(row['ratio'], lambda v: f'{v:.2f}')} "
        f"| {each(row['cpu_ratio'], lambda v: f'{v:.2f}')} | {wanted:g} | {met} |"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["demo", "moe"])
    parser.add_argument("--binary", type=pathlib.Path, help="a built amphora-versus; else cargo builds it")
    parser.add_argument("--markdown", type=pathlib.Path, help="where the table goes beside stdout")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(THREADS)
    binary = options.binary
    if binary is None:
        build = ["cargo", "build", "--release", "-p", "amphora-benches", "--bin", "amphora-versus"]
        subprocess.run(build, cwd=ROOT, check=True)
        binary = ROOT / "target/release/amphora-versus"
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        if options.only != "moe":
            rows += measure(demo(), binary, options.rounds)
        if options.only != "demo":
            rows += measure(random_moe(pathlib.Path(folder)), binary, options.rounds)
    table = "\n".join([HEADER, *map(line, rows)])
    print(table)
    if options.markdown:
        options.markdown.write_text(table + "\n")


if __name__ == "__main__":
    main()
