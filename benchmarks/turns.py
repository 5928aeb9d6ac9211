#!/usr/bin/env python3
"""Rollouts of several turns: episodes whose environment takes its time, here and by TRL with vLLM.

Every episode has `--turns` turns; after each the environment thinks for 0 to `--tool-s` seconds and asks for
another number. Both sample from the same model and count the seconds of a batch's rollouts. The first batch
pays for the set-up and is not counted; TRL's tools answer at once in it.

    python benchmarks/turns.py --model FOLDER                              # ours, 256 episodes of 8 turns
    python benchmarks/turns.py --model FOLDER --who trl --episodes 16
    python benchmarks/turns.py --model pebble --episodes 16 --turns 2 --tool-s 0.2 --device cpu

TRL executes the tools of all episodes one after the other in its own process, so its time grows with their
number. It reads calls from what the model wrote; here every answer counts as a call, or the episodes of a
model that does not call would end. Its loop is its own.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

TASK = "I think of a number between 1 and 100. Answer with one guess, a number alone."
AGAIN = "That is not it. Answer with another number alone."
SAMPLES = 8  # of each problem


class Slow:
    """An environment that thinks before it answers."""

    def __init__(self, turns: int = 8, seconds: float = 2.0):
        self.turns, self.seconds = turns, seconds

    def reset(self, seed: int) -> str:
        self.random, self.turn = random.Random(seed), 0
        return TASK

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        is_last = self.turn >= self.turns
        if not is_last:  # TRL does not execute the call of the last turn either
            time.sleep(self.random.uniform(0, self.seconds))
        return AGAIN, float(self.random.random() < 0.5), is_last, False, {}


def ours(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    settings = {"turns": args.turns, "seconds": args.tool_s}
    config = {
        "model_name_or_path": args.model,
        "bf16": args.device == "cuda",
        "datasets": {f"{Path(__file__).resolve()}:Slow": {"config": settings}},
        "prompts_per_step": args.episodes // SAMPLES,
        "num_generations": SAMPLES,
        "max_steps": 2,
        "max_turns": args.turns + 1,
        "max_completion_length": args.turns * args.turn_tokens,
        "learning_rate": 1e-6,
        "eval_num_samples": 0,
        "save_strategy": "no",
        "preflight": "off",
        "output_dir": str(folder),
        "run_name": "turns",
    }
    file = folder / "turns.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    subprocess.run([sys.executable, "-m", "whetstone", "train", str(file)], check=True)
    rows = [json.loads(line) for line in (folder / "turns" / "metrics.jsonl").read_text().splitlines()]
    row = next(row for row in rows if row["kind"] == "train" and row["step"] == 2)
    return {
        "who": "whetstone",
        "seconds": round(row["time/rollout"], 2),
        "turns": round(row["episodes/mean_turns"], 2),
        "environment_s": round(row["episodes/environment_s"], 2),
        "idle_s": round(row["episodes/idle_s"], 2),
        "sampled_tokens": round(row["completions/mean_length"] * args.episodes),
    }


def trl(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.trainer import grpo_trainer
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    thoughts = random.Random(0)
    calls: list[float] = []

    def think(guess: str) -> str:
        """
        Think about a guess.

        Args:
            guess: The guess.

        Returns:
            What to do next.
        """
        begun = time.perf_counter()
        time.sleep(thoughts.uniform(0, args.tool_s) if batches else 0.0)
        calls.append(time.perf_counter() - begun)
        return AGAIN

    def every_answer_is_a_call(tokenizer: Any, ids: list[int], **_: Any) -> dict[str, Any]:
        text = tokenizer.decode(ids, skip_special_tokens=True)
        call = {"type": "function", "function": {"name": "think", "arguments": {"guess": text}}}
        return {"role": "assistant", "content": text, "tool_calls": [call]}

    grpo_trainer.parse_response = every_answer_is_a_call  # type: ignore[attr-defined]
    batches: list[dict[str, Any]] = []

    class Timed(GRPOTrainer):
        def _generate(self, prompts: list) -> Any:
            calls.clear()
            begun = time.perf_counter()
            out = super()._generate(prompts)
            seconds, num_calls = time.perf_counter() - begun, len(calls)
            batches.append({"seconds": seconds, "calls": num_calls, "tool_s": sum(calls)})
            print(f"batch {len(batches)}: {seconds:.2f} s, {num_calls} calls", flush=True)
            return out

    on_gpu = args.device == "cuda"
    settings = GRPOConfig(
        output_dir=str(folder),
        use_vllm=on_gpu,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.4,
        vllm_max_model_length=args.turns * (args.turn_tokens + 128) + 256,
        per_device_train_batch_size=SAMPLES,
        gradient_accumulation_steps=args.episodes // SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=args.turns * (args.turn_tokens + 64),
        max_tool_calling_iterations=args.turns - 1,
        generation_kwargs={"max_tokens" if on_gpu else "max_new_tokens": args.turn_tokens},
        max_steps=2,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        report_to="none",
        save_strategy="no",
        model_init_kwargs={"dtype": "float32"},
    )
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": TASK}]}] * args.episodes)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.response_schema = {"type": "object"}  # or TRL parses nothing
    Timed(
        model=args.model,
        reward_funcs=lambda completions, **_: [thoughts.random() for _ in completions],
        args=settings,
        train_dataset=rows,
        processing_class=tokenizer,
        tools=[think],
    ).train()
    last = batches[-1]
    return {
        "who": "TRL",
        "seconds": round(last["seconds"], 2),
        "turns": 1 + last["calls"] / args.episodes,
        "environment_s": round(last["tool_s"] / args.episodes, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a folder or a name; TRL needs a folder")
    parser.add_argument("--who", choices=("ours", "trl"), default="ours")
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tool-s", type=float, default=2.0, help="the longest time that an answer takes")
    parser.add_argument("--turn-tokens", type=int, default=64, help="the longest answer of the policy")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    if args.episodes % SAMPLES:
        parser.error(f"--episodes must be a multiple of {SAMPLES}")
    with tempfile.TemporaryDirectory() as folder:
        row = {"ours": ours, "trl": trl}[args.who](args, Path(folder))
    print(json.dumps({**row, "episodes": args.episodes, "tool_s": args.tool_s}))


if __name__ == "__main__":
    main()
