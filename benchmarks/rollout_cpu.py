"""Rollout speed on a CPU: the native engine and transformers' generate on the same prompts and numbers of
tokens, in one run.

    python benchmarks/rollout.py --cpu                                 # pebble, 64 sequences
    python benchmarks/rollout.py --cpu --model smollm2-135m --new-tokens 48 --write

Every sequence runs to its full length, so both do the same work. Prints tokens/s and the ratio; `--write`
keeps the rows with date, machine and versions in benchmarks/results/rollout_cpu.json. Does not train.
"""

import argparse
import json
import os
import platform
import time
from pathlib import Path

import torch
import transformers

from whetstone.config.sections import ModelConfig
from whetstone.engines.base import Engine, Request, SamplingParams
from whetstone.engines.hf import HFEngine
from whetstone.engines.native import NativeEngine
from whetstone.model.attention import NAME
from whetstone.model.policy import Policy, load_policy


def make_requests(policy: Policy, args: argparse.Namespace) -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    shortest, longest = args.prompt_tokens
    requests = []
    for number in range(args.sequences // args.group):
        length = int(torch.randint(shortest, longest + 1, (), generator=generator))
        tokens = torch.randint(0, policy.config.vocab_size, (length,), generator=generator).tolist()
        seeds = tuple(number * args.group + sample for sample in range(args.group))
        requests.append(Request(prompt_ids=tuple(tokens), seeds=seeds))
    return requests


def measure(engine: Engine, requests: list[Request], args: argparse.Namespace) -> float:
    """Best seconds of `args.repeats` runs, after a short warm-up."""
    for _ in engine.generate(requests[:1], SamplingParams(max_tokens=2, ignore_eos=True)):
        pass
    best = float("inf")
    for _ in range(args.repeats):
        begun = time.perf_counter()
        tokens = sum(len(one.completion.token_ids) for one in engine.generate(requests, args.sampling))
        best = min(best, time.perf_counter() - begun)
        assert tokens == args.sequences * args.new_tokens
    return best


def measure_plain(policy: Policy, requests: list[Request], args: argparse.Namespace) -> float:
    """`model.generate` by itself, tokens only: the native engine also gives logprobs and still has to win."""
    prompts = [list(request.prompt_ids) for request in requests for _ in request.seeds]
    width = max(map(len, prompts))
    pad = policy.tokenizer.pad_token_id
    tokens = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=policy.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=policy.device)
    settings = {"do_sample": True, "top_k": 0, "eos_token_id": [-1], "pad_token_id": pad}
    policy.set_attention(policy.original_attention)
    best = float("inf")
    for _ in range(args.repeats):
        begun = time.perf_counter()
        with torch.inference_mode():
            out = policy.lm.generate(tokens, attention_mask=mask, max_new_tokens=args.new_tokens, **settings)
        best = min(best, time.perf_counter() - begun)
        assert out.shape[1] - width == args.new_tokens
    policy.set_attention(NAME)
    return best


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="pebble")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=(48, 96), metavar=("FROM", "TO"))
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args(words)
    args.sampling = SamplingParams(max_tokens=args.new_tokens, ignore_eos=True)
    policy = load_policy(ModelConfig(model_name_or_path=args.model))
    requests = make_requests(policy, args)
    timed = {
        "native": measure(NativeEngine(policy, args.sequences), requests, args),
        "generate": measure_plain(policy, requests, args),
        "generate with logprobs": measure(HFEngine(policy, args.sequences, None), requests, args),
    }
    rows = []
    for who, seconds in timed.items():
        rate = args.sequences * args.new_tokens / seconds
        rows.append({"who": who, "model": args.model, "seconds": seconds, "tokens_per_s": rate})
        print(f"{who:24s} {seconds:8.2f} s {rate:10,.0f} tokens/s", flush=True)
    ratio = rows[0]["tokens_per_s"] / rows[1]["tokens_per_s"]
    print(f"native / generate = {ratio:.2f}")
    if args.write:
        write(rows, ratio, args, policy)


def write(rows: list[dict], ratio: float, args: argparse.Namespace, policy: Policy) -> None:
    path = Path(__file__).parent / "results" / "rollout_cpu.json"
    entry = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {policy.device}",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "command": f"python benchmarks/rollout.py --cpu --model {args.model} --sequences {args.sequences} "
        f"--new-tokens {args.new_tokens}",
        "work": f"{args.sequences} sequences in groups of {args.group}, prompts of "
        f"{args.prompt_tokens[0]} to {args.prompt_tokens[1]} tokens, {args.new_tokens} new tokens each",
        "rows": rows,
        "ratio_to_generate": round(ratio, 2),
    }
    kept = (
        [old for old in json.loads(path.read_text()) if old["command"] != entry["command"]]
        if path.is_file()
        else []
    )
    path.write_text(json.dumps([*kept, entry], indent=1) + "\n")
