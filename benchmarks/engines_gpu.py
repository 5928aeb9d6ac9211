"""vLLM on a GPU as whetstone uses it, every way that one GPU allows: in the process with sleep, as a server
with weights by IPC and by file, with LoRA, killed in the middle of a batch, and in whole runs.

    python benchmarks/engines_gpu.py --model FOLDER                      # every part, one after the other
    python benchmarks/engines_gpu.py --model FOLDER --parts colocate,ipc --out results.json

Each part runs in a process of its own, with a time limit, and gives one row: what was checked (greedy
tokens against the native engine, logprobs against the trainer, after every push) and what was measured. NCCL
can't have one GPU twice: with a second GPU the part `nccl` sends weights to it, with one it shows how that
fails. vLLM 0.24 imports ray for IPC without using it: where ray is missing, an empty module stands in for it.
"""

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from whetstone.config import load
from whetstone.engines import make_engine
from whetstone.engines.base import Request, SamplingParams
from whetstone.engines.native import NativeEngine
from whetstone.engines.servers.pool import ServerPool
from whetstone.errors import UserError
from whetstone.model.attention import PackedAttention, packed_segments
from whetstone.model.policy import Policy, load_policy

PARTS = ["colocate", "colocate_lora", "disk", "ipc", "lora", "killed", "run_colocate", "run_server", "nccl"]
NUM_TOKENS = 256
EAGER = "server_args=[--enforce-eager]"  # checks need no CUDA graphs, which take their time to start


def requests_of(policy: Policy, num_prompts: int, group: int) -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    vocabulary = policy.config.vocab_size
    return [
        Request(
            prompt_ids=tuple(torch.randint(5, vocabulary, (64 + 8 * n % 64,), generator=generator).tolist()),
            seeds=tuple(1000 * n + s for s in range(group)),
        )
        for n in range(num_prompts)
    ]


@torch.no_grad()
def difference(
    policy: Policy, requests: list[Request], samples: Any, temperature: float
) -> tuple[float, float]:
    """Mean and largest difference between the engine's logprobs and the trainer's."""
    gaps = []
    for one in samples:
        prompt, tokens = requests[one.request].prompt_ids, one.completion.token_ids
        ids = torch.tensor([*prompt, *tokens], device=policy.device)
        positions = torch.arange(len(ids), device=policy.device)
        attend = PackedAttention(packed_segments([len(ids)]), policy.device)
        hidden = policy.hidden(ids[None], positions[None], attend)[0, len(prompt) - 1 : -1]
        logprobs = (policy.head(hidden).float() / temperature).log_softmax(-1)
        own = logprobs.gather(-1, ids[len(prompt) :, None]).squeeze(-1).cpu()
        gaps.append((own - torch.tensor(one.completion.logprobs)).abs())
    joined = torch.cat(gaps)
    return joined.mean().item(), joined.max().item()


def move(policy: Policy, seed: int) -> None:
    """What an update does, only more of it."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            spread = parameter.float().std().nan_to_num() + 1e-3
            parameter.add_(torch.randn_like(parameter) * spread * 0.1)


def check(engine: Any, policy: Policy, policy_version: int) -> dict[str, Any]:
    """Greedy tokens and logprobs of the weights as they are now."""
    requests = requests_of(policy, 8, 4)
    sampling = SamplingParams(max_tokens=64, temperature=0.7, ignore_eos=True)
    samples = list(engine.generate(requests, sampling))
    assert {one.completion.policy_version for one in samples} == {policy_version}
    assert len(samples) == 32
    mean, largest = difference(policy, requests, samples, 0.7)
    singles = [Request(prompt_ids=request.prompt_ids, seeds=(0,)) for request in requests]
    greedy = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    ours = {one.request: one.completion.token_ids for one in engine.generate(singles, greedy)}
    native = {
        one.request: one.completion.token_ids for one in NativeEngine(policy, 8).generate(singles, greedy)
    }
    same = sum(a == b for r in ours for a, b in zip(ours[r], native[r], strict=True)) / (64 * len(ours))
    first = sum(ours[r][0] == native[r][0] for r in ours) / len(ours)
    return {
        "version": policy_version,
        "logprob_difference_mean": round(mean, 5),
        "logprob_difference_max": round(largest, 4),
        "greedy_tokens_as_native": round(same, 3),
        "first_greedy_token_as_native": first,
    }


def free_gb() -> float:
    torch.cuda.empty_cache()
    return round(torch.cuda.mem_get_info()[0] / 1e9, 2)


def timed(what: Any) -> float:
    begun = time.perf_counter()
    what()
    torch.cuda.synchronize()
    return round(time.perf_counter() - begun, 3)


def tokens_per_s(engine: Any, policy: Policy) -> int:
    requests = requests_of(policy, 32, 8)
    sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    best = min(timed(lambda: list(engine.generate(requests, sampling))) for _ in range(2))
    return round(256 * NUM_TOKENS / best)


def started(model: str, *words: str) -> tuple[Any, Policy]:
    base = [
        f"model_name_or_path={model}",
        "bf16=true",
        "device=cuda",
        "rollout_engine=vllm",
        "max_num_seqs=256",
    ]
    lengths = ["max_completion_length=256", "server_max_model_length=512", f"output_dir={tempfile.mkdtemp()}"]
    config = load(None, [*base, *lengths, "server_timeout_s=170", *words]).config
    policy = load_policy(config.model)
    return make_engine(config, policy), policy


def try_engine(model: str, *words: str) -> dict[str, Any]:
    """Start, push, check, sleep, push again while asleep, check."""
    row: dict[str, Any] = {"free_gb_before": free_gb(), "checks": []}
    begun = time.perf_counter()
    engine, policy = started(model, *words)
    row["start_s"] = round(time.perf_counter() - begun, 1)
    with contextlib.closing(engine):
        row["push_s"] = [timed(lambda: engine.update_weights(0))]
        row["checks"].append(check(engine, policy, 0))
        move(policy, 1)
        stale = requests_of(policy, 8, 4)
        samples = list(engine.generate(stale, SamplingParams(max_tokens=64, ignore_eos=True)))
        row["difference_if_nothing_were_pushed"] = round(difference(policy, stale, samples, 1.0)[0], 4)
        row["push_s"].append(timed(lambda: engine.update_weights(1)))
        row["checks"].append(check(engine, policy, 1))
        row["free_gb_awake"] = free_gb()
        row["sleep_s"] = timed(engine.sleep)
        row["free_gb_asleep"] = free_gb()
        move(policy, 2)
        row["push_s"].append(timed(lambda: engine.update_weights(2)))
        row["wake_s"] = timed(engine.wake)
        row["checks"].append(check(engine, policy, 2))
        row["tokens_per_s"] = tokens_per_s(engine, policy)
        if isinstance(engine, ServerPool):
            row["transfer"] = [type(handle.server.transfer).__name__ for handle in engine.handles]  # type: ignore[attr-defined]
    row["native_tokens_per_s"] = tokens_per_s(NativeEngine(policy, 256), policy)
    return row


def killed(model: str) -> dict[str, Any]:
    """SIGKILL in the middle of a batch: the run starts its server again, gives it the weights and goes on."""
    engine, policy = started(model, "weight_transfer=disk", EAGER)
    with contextlib.closing(engine):
        move(policy, 1)  # so that a server with the weights it was started with would be found out
        engine.update_weights(1)
        requests = requests_of(policy, 16, 8)
        samples = engine.generate(requests, SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
        taken = [next(samples)]
        process = engine.handles[0].process.process
        os.kill(process.pid, signal.SIGKILL)
        seconds = timed(lambda: taken.extend(samples))
        assert {one.completion.policy_version for one in taken} == {1}
        mean, _ = difference(policy, requests, taken, 1.0)
        places = {(one.request, one.sample) for one in taken}
        assert len(places) == len(taken) == 128, "samples were lost"
        return {
            "samples": len(taken),
            "drawn_again": engine.num_retried,
            "until_all_were_there_s": seconds,
            "logprob_difference_mean": round(mean, 5),
        }


def run(*words: str) -> dict[str, Any]:
    """The quickstart, sampled by vLLM: does it learn?"""
    from whetstone.train import train

    folder = tempfile.mkdtemp()
    short = ["max_steps=20", "fixed_eval_steps=0", "eval_num_samples=200", "save_strategy=no", "bf16=true"]
    places = [f"output_dir={folder}", "run_name=run", "device=cuda", "server_timeout_s=170"]
    results = train(load("quickstart", [*short, *places, "rollout_engine=vllm", *words]))
    lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == "train"]
    return {
        "accuracy_before": results["accuracy_before"]["mean"],
        "accuracy_after": results["accuracy_after"]["mean"],
        "seconds": results["seconds"],
        "seconds_a_step_after_the_first": round(sum(r["step_time"] for r in rows[1:]) / (len(rows) - 1), 3),
        "logprob_difference_mean": [round(row["sampling/sampling_logp_difference/mean"], 5) for row in rows],
    }


def part(name: str, model: str) -> dict[str, Any]:
    if name in ("ipc", "run_server") and find_spec("ray") is None:
        stand_in = Path(tempfile.mkdtemp())
        (stand_in / "ray.py").write_text('"""Empty: vLLM imports it and does not use it here."""\n')
        os.environ["PYTHONPATH"] = f"{stand_in}:{os.environ.get('PYTHONPATH', '')}"
    if name == "nccl":
        several = torch.cuda.device_count() > 1
        try:
            return try_engine(
                model, EAGER, f"server_devices=[{int(several)}]", "server_gpu_memory_utilization=0.3"
            )
        except UserError as error:
            return {"ended_with": str(error), "gpus": torch.cuda.device_count()}
    return {
        "colocate": lambda: try_engine(model, "vllm_mode=colocate"),
        "colocate_lora": lambda: try_engine(model, "vllm_mode=colocate", "use_peft=true"),
        "disk": lambda: try_engine(model, "weight_transfer=disk", EAGER),
        "ipc": lambda: try_engine(model, "weight_transfer=ipc", EAGER),
        "lora": lambda: try_engine(model, "use_peft=true", EAGER),
        "killed": lambda: killed(model),
        "run_colocate": lambda: run("vllm_mode=colocate"),
        "run_server": lambda: run("weight_transfer=ipc", EAGER),
    }[name]()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder of a small pretrained model")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--limit-s", type=int, default=240, help="of each part")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/engines_gpu.json"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print("\nROW " + json.dumps(part(args.one, args.model)), flush=True)
        return
    rows = {
        "machine": f"{torch.cuda.get_device_name()} x {torch.cuda.device_count()}",
        "versions": {name: version(name) for name in ("torch", "transformers", "vllm")},
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python benchmarks/engines_gpu.py --model {Path(args.model).name} --parts {args.parts}",
        "parts": {},
    }
    for name in args.parts.split(","):
        rows["parts"][name] = in_a_process(name, args)
        print(name, json.dumps(rows["parts"][name]), flush=True)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


def in_a_process(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Its row, or the end of what it said."""
    words = [sys.executable, __file__, "--model", args.model, "--one", name]
    begun = time.monotonic()
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        said, _ = process.communicate(timeout=args.limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        time.sleep(5)
        said = "time limit; " + (process.communicate(timeout=20)[0] or "")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    lines = [line for line in said.splitlines() if line.startswith("ROW ")]
    row = json.loads(lines[-1][4:]) if lines else {"failed": said[-3000:]}
    return {**row, "part_s": round(time.monotonic() - begun, 1)}


if __name__ == "__main__":
    main()
