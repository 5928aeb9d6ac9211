"""Real training runs under a cap on the GPU's memory: what fits, how fast, with which settings.

    python benchmarks/memory.py --write           # 1.5 B in 16 GB, 3 B in 24 GB, 7 B with LoRA in 24 GB
    python benchmarks/memory.py --only 7b --steps 5
    python benchmarks/memory.py --table           # the table of what was kept

Each is `whet train` on a model folder with random weights: 20 steps of 8 prompts x 4 completions of 512
tokens, rollouts by the native engine, the allocator capped before anything is loaded. Seconds are the median
of a step, memory the most that was allocated at any moment of the run.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from contest import HERE, Contest, Row, into_docs, machine, table

RESULTS = HERE / "results" / "memory.json"
COLUMNS = (
    "size", "cap_gb", "settings", "steps", "step_s", "rollout_s", "update_s", "peak_gb", "micro_batch_tokens",
    "layers_run_again", "oom_splits",
)  # fmt: skip
OFFLOADED = {"optim": "adamw_8bit", "cpu_offload": "optimizer"}
CASES: dict[str, Row] = {
    "1.5b": {"cap_gb": 16, "setting": OFFLOADED},
    "3b": {"cap_gb": 24, "setting": OFFLOADED},
    "7b": {"cap_gb": 24, "setting": {"use_peft": True}},
}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--limit-s", type=float, default=570.0, help="stop after so many seconds")
    parser.add_argument("--write", action="store_true", help="keep the rows in --out")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "whetstone-models")
    parser.add_argument("--table", action="store_true", help="print what was kept, and stop")
    parser.add_argument("--docs", action="store_true", help="with --table: put it into docs/lab/update.md")
    args = parser.parse_args(words)
    if args.table:
        text = table(json.loads(args.out.read_text())["rows"], COLUMNS)
        return into_docs(args.out.name, text) if args.docs else print(text)
    contest = Contest(
        script="memory.py",
        identity=("size", "cap_gb", "settings"),
        about={
            "machine": machine(),
            "command": "python benchmarks/memory.py --write",
            "work": "20 steps of 8 prompts x 4 completions of 512 tokens, all of them; random weights",
        },
        out=args.out if args.write else None,
        limit_s=args.limit_s - 10,
        finish=lambda rows: None,
    )
    from update import model_folder

    for size in args.only.split(","):
        task = {"who": "ours", "size": size, "steps": args.steps, **CASES[size]}
        contest.run({**task, "model": model_folder(size, args.models, contest.left_s)})


def run(task: Row) -> Row:
    """One case, in this process."""
    import torch

    from whetstone.config import load
    from whetstone.run.metrics import read_rows
    from whetstone.train import train

    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(task["cap_gb"] * 1e9 / total)
    with tempfile.TemporaryDirectory() as folder:
        words = {
            "model_name_or_path": task["model"],
            "output_dir": folder,
            "max_steps": task["steps"],
            "prompts_per_step": 8,
            "num_generations": 4,
            "max_completion_length": 512,
            "bf16": True,
            "apply_chat_template": False,
            "datasets": {"chain_sum": {}},
            "reward_funcs": [f"{HERE / 'step_reward.py'}:digit_share"],
            "eval_num_samples": 0,
            "save_strategy": "no",
            **task["setting"],
        }
        train(load(None, [f"{key}={json.dumps(value)}" for key, value in words.items()]))
        rows = [row for row in read_rows(Path(folder) / "metrics.jsonl") if "time/update" in row]
    later = rows[1:]  # the first compiles, captures and tries out what fits
    return {
        "who": "ours",
        "size": task["size"],
        "cap_gb": task["cap_gb"],
        "settings": json.dumps(task["setting"]),
        "steps": len(rows),
        "step_s": statistics.median(row["step_time"] for row in later),
        "rollout_s": statistics.median(row["time/rollout"] for row in later),
        "update_s": statistics.median(row["time/update"] for row in later),
        "peak_gb": max(row["peak_memory_gb"] for row in rows),
        "completion_tokens": later[-1]["completions/mean_length"],
        "micro_batch_tokens": rows[-1]["micro_batch_tokens"],
        "layers_run_again": rows[-1].get("checkpointed_layers", 0),
        "oom_splits": sum(row["oom_splits"] for row in rows),
        "grad_norm": later[-1]["grad_norm"],
    }


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):  # started by contest.py
        print("ROW " + json.dumps(run(json.loads(sys.argv[1]))), flush=True)
    else:
        main()
