"""`whet plan` beside real runs: memory and seconds, planned and measured, for many settings.

    python benchmarks/plan.py --write             # on a GPU: 0.5 B to 7 B, full and LoRA, two batch shapes
    python benchmarks/plan.py --only 0.5b --steps 3
    python benchmarks/plan.py --cpu               # the embedded model, to try it out
    python benchmarks/plan.py --table

Each is `whet train` on a folder with random weights, all completions of full length. Memory is the most that
was allocated at any moment, seconds are the median of the steps after the first. The plan has the rates of
the data sheet.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from contest import HERE, Contest, Row, attempt, machine, table

RESULTS = HERE / "results" / "plan.json"
COLUMNS = (
    "size", "settings", "peak_gb", "planned_peak_gb", "peak_ratio", "step_s", "planned_step_s", "step_ratio",
    "micro_batch_tokens", "planned_tokens",
)  # fmt: skip
WIDE = {"prompts_per_step": 32, "num_generations": 8, "max_completion_length": 256}
LONG = {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 2048}
LORA = {"use_peft": True}
CASES: list[tuple[str, Row]] = [
    ("0.5b", WIDE),
    ("0.5b", {**LONG, "gradient_checkpointing": True}),
    ("1.5b", WIDE),
    ("1.5b", LONG),
    ("1.5b", {**WIDE, "gradient_checkpointing": True}),
    ("1.5b", {**WIDE, "optim": "adamw_8bit"}),
    ("1.5b", {**WIDE, **LORA}),
    ("1.5b", {**WIDE, **LORA, "load_in_4bit": True}),
    ("1.5b", {**WIDE, "beta": 0.01}),
    ("3b", WIDE),
    ("3b", {**LONG, "cpu_offload": "optimizer"}),
    ("7b", {**WIDE, **LORA}),
    ("7b", {**LONG, **LORA, "gradient_checkpointing": True}),
]


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="sizes: 0.5b,1.5b,3b,7b")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=570.0, help="stop after so many seconds")
    parser.add_argument("--write", action="store_true", help="keep the rows in --out")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "whetstone-models")
    parser.add_argument("--cpu", action="store_true", help="the embedded model on a CPU")
    parser.add_argument("--table", action="store_true", help="print what was kept, and stop")
    args = parser.parse_args(words)
    if args.table:
        return print(table(json.loads(args.out.read_text())["rows"], COLUMNS))
    contest = Contest(
        script="plan.py",
        identity=("size", "settings"),
        about={"machine": machine(), "command": "python benchmarks/plan.py --write"},
        out=args.out if args.write else None,
        limit_s=args.limit_s - 10,
        finish=lambda rows: None,
    )
    if args.cpu:
        setting = {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 32}
        task = {"who": "plan", "size": "pebble", "steps": args.steps, "setting": setting, "model": "pebble"}
        contest.run(task)
    else:
        from update import model_folder

        for size, setting in CASES:
            if args.only is None or size in args.only.split(","):
                task = {"who": "plan", "size": size, "steps": args.steps, "setting": setting}
                contest.run({**task, "model": model_folder(size, args.models, contest.left_s)})
    print(table(contest.rows, COLUMNS))


def run(task: Row) -> Row:
    """One case, in this process."""
    import torch

    from whetstone.config import load
    from whetstone.cost.chips import find_chip
    from whetstone.cost.estimate import estimate
    from whetstone.cost.prompts import look_at_prompts
    from whetstone.cost.shape import model_shape
    from whetstone.cost.timing import chip_machine
    from whetstone.model.memory import usable_memory
    from whetstone.run.host import memory_limit
    from whetstone.run.metrics import read_rows
    from whetstone.train import train

    on_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "model_name_or_path": task["model"],
            "output_dir": folder,
            "max_steps": task["steps"],
            "bf16": on_gpu,
            "apply_chat_template": False,
            "datasets": {"chain_sum": {}},
            "reward_funcs": [f"{HERE / 'step_reward.py'}:digit_share"],
            "eval_num_samples": 0,
            "save_strategy": "no",
            "preflight": "off",
            **task["setting"],
        }
        loaded = load(None, [f"{key}={json.dumps(value)}" for key, value in settings.items()])
        chip = find_chip(torch.cuda.get_device_name()) if on_gpu else None
        train(loaded)
        rows = [row for row in read_rows(Path(folder) / "metrics.jsonl") if "time/update" in row]
        plan = estimate(
            loaded.config,
            model_shape(task["model"]),
            look_at_prompts(loaded.config),
            capacity=float(usable_memory(torch.device("cuda")) if on_gpu else memory_limit()),
            machine=None if chip is None else chip_machine(chip),
            on_gpu=on_gpu,
            tokens=rows[-1]["completions/mean_length"],
        )
    peak = max(row["peak_memory_gb"] for row in rows)
    step = statistics.median(row["step_time"] for row in rows[1:])
    planned_step = None if plan.time is None else plan.time.batch_s
    return {
        "peak_gb": peak,
        "planned_peak_gb": plan.memory.peak / 1e9,
        "peak_ratio": plan.memory.peak / 1e9 / peak,
        "step_s": step,
        "planned_step_s": planned_step,
        "step_ratio": None if planned_step is None else planned_step / step,
        "micro_batch_tokens": rows[-1]["micro_batch_tokens"],
        "planned_tokens": plan.memory.tokens,
        "completion_tokens": rows[-1]["completions/mean_length"],
    }


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):  # started by contest.py
        case = json.loads(sys.argv[1])
        about = {"who": case["who"], "size": case["size"], "settings": json.dumps(case["setting"])}
        attempt(about, lambda: run(case))
    else:
        main()
