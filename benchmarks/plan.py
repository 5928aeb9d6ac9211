"""`whet plan` beside real runs: memory and seconds, planned and measured, for many settings.

    python benchmarks/plan.py --write             # on a GPU: 0.5 B to 7 B, full and LoRA, two batch shapes
    python benchmarks/plan.py --only 0.5b --steps 3
    python benchmarks/plan.py --cpu               # the embedded model, to try it out
    python benchmarks/plan.py --table

Each is `whet train` on a folder with random weights, all completions of full length. Memory is the most that
was allocated at any moment, seconds are those of the fastest step after the first. The file keeps what was
measured; what is planned is computed when the table is printed, with the rates of the data sheet and with
those that `whet plan --measure` found on that machine. Settings with a cap do not fit it as they are: they
run under it with the change that `whet plan` suggests.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from contest import HERE, Contest, Row, attempt, machine, table

RESULTS = HERE / "results" / "plan.json"
COLUMNS = (
    "size", "settings", "cap_gb", "change", "peak_gb", "planned_peak_gb", "peak_ratio", "step_s", "by_chip",
    "by_measured", "micro_batch_tokens", "planned_tokens",
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
CAPPED: list[tuple[str, int, Row]] = [
    ("0.5b", 8, WIDE),
    ("1.5b", 24, WIDE),
    ("1.5b", 16, WIDE),
    ("3b", 24, LONG),
    ("7b", 24, WIDE),
]


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="sizes: 0.5b,1.5b,3b,7b")
    parser.add_argument("--cases", choices=("free", "capped", "all"), default="all")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--limit-s", type=float, default=570.0, help="stop after so many seconds")
    parser.add_argument("--write", action="store_true", help="keep the rows in --out")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "whetstone-models")
    parser.add_argument("--cpu", action="store_true", help="the embedded model on a CPU")
    parser.add_argument("--table", action="store_true", help="print what was kept, and stop")
    args = parser.parse_args(words)
    if args.table:
        return print(table(compare(json.loads(args.out.read_text())["rows"]), COLUMNS))
    contest = Contest(
        script="plan.py",
        identity=("size", "settings", "cap_gb"),
        about={"machine": machine(), "command": "python benchmarks/plan.py --write"},
        out=args.out if args.write else None,
        limit_s=args.limit_s - 10,
        finish=lambda rows: None,
    )
    if args.cpu:
        setting = {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 32}
        contest.run(
            {"who": "plan", "size": "pebble", "steps": args.steps, "setting": setting, "model": "pebble"}
        )
    else:
        from update import model_folder

        only = None if args.only is None else args.only.split(",")
        contest.run({"who": "rates", "size": "-"})
        free = [(size, None, setting) for size, setting in CASES]
        for size, cap, setting in {"free": free, "capped": CAPPED, "all": [*free, *CAPPED]}[args.cases]:
            if only is None or size in only:
                task = {"who": "plan", "size": size, "steps": args.steps, "setting": setting, "cap_gb": cap}
                model = model_folder(size, args.models, contest.left_s)
                contest.run({**task, "model": model})
    print(table(compare(contest.rows), COLUMNS))


def run(task: Row) -> Row:
    """One case, in this process."""
    import torch

    from whetstone.config import load
    from whetstone.cost.estimate import smallest_change
    from whetstone.cost.prompts import look_at_prompts
    from whetstone.cost.shape import model_shape
    from whetstone.model.memory import usable_memory
    from whetstone.run.host import memory_limit
    from whetstone.run.metrics import read_rows
    from whetstone.train import train

    on_gpu = torch.cuda.is_available()
    if task.get("cap_gb"):
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(task["cap_gb"] * 1e9 / total)
    capacity = float(usable_memory(torch.device("cuda")) if on_gpu else memory_limit())
    shape = model_shape(task["model"])
    change: Row | None = {}
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
        if task.get("cap_gb"):
            config = load(None, as_words(settings)).config
            change = smallest_change(config, shape, look_at_prompts(config), capacity=capacity)
            if not change:
                raise RuntimeError("nothing makes it fit" if change is None else "it fits as it is")
            settings |= change
        loaded = load(None, as_words(settings))
        train(loaded)
        rows = [row for row in read_rows(Path(folder) / "metrics.jsonl") if "time/update" in row]

    fastest = min(rows[1:], key=lambda row: row["step_time"])  # the first compiles and looks for a size
    return {
        "cap_gb": task.get("cap_gb"),
        "change": json.dumps(change),
        "usable_gb": capacity / 1e9,
        "prompt_tokens": look_at_prompts(loaded.config).tokens,
        "completion_tokens": fastest["completions/mean_length"],
        "peak_gb": max(row["peak_memory_gb"] for row in rows),
        "step_s": fastest["step_time"],
        "rollout_s": fastest["time/rollout"],
        "update_s": fastest["time/update"],
        "micro_batch_tokens": rows[-1]["micro_batch_tokens"],
        "checkpointed_layers": rows[-1].get("checkpointed_layers", 0),
        "oom_splits": sum(row["oom_splits"] for row in rows),
    }


def compare(rows: list[Row]) -> list[Row]:
    """Measured rows with what is planned for them today."""
    from whetstone.cost.chips import find_chip
    from whetstone.cost.timing import chip_machine, machine_of

    rates = next((machine_of(**row["rates"]) for row in rows if "rates" in row), None)
    chip = None if rates is None else find_chip(rates.name)
    compared = []
    for row in rows:
        if "peak_gb" in row:
            by_chip = plan_of(row, None if chip is None else chip_machine(chip))
            by_rates = plan_of(row, rates)
            peak = by_chip.memory.peak / 1e9
            row = {
                **row,
                "planned_peak_gb": peak,
                "peak_ratio": peak / row["peak_gb"],
                "by_chip": None if by_chip.time is None else by_chip.time.batch_s / row["step_s"],
                "by_measured": None if by_rates.time is None else by_rates.time.batch_s / row["step_s"],
                "planned_tokens": by_chip.memory.tokens,
            }
        if "rates" not in row:
            compared.append(row)
    return compared


def plan_of(row: Row, machine: Any) -> Any:
    """The plan of a row's settings with the change that it ran with."""
    from rollout_work import model_config

    from whetstone.config import load
    from whetstone.cost.estimate import estimate
    from whetstone.cost.prompts import Prompts
    from whetstone.cost.shape import model_shape, shape_of

    on_gpu = row["size"] != "pebble"
    shape = shape_of(row["size"], model_config(row["size"])) if on_gpu else model_shape("pebble")
    settings = {"bf16": on_gpu, "eval_num_samples": 0, "max_steps": 1, "datasets": {"chain_sum": {}}}
    settings |= json.loads(row["settings"]) | json.loads(row["change"])
    return estimate(
        load(None, as_words(settings)).config,
        shape,
        Prompts(tokens=row["prompt_tokens"], num_problems=10_000, source=""),
        capacity=row["usable_gb"] * 1e9,
        machine=machine,
        on_gpu=on_gpu,
        tokens=row["completion_tokens"],
    )


def as_words(settings: Row) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


def measure_rates() -> Row:
    """The rates of this GPU, as `whet plan --measure` has them."""
    import torch

    from whetstone.cost.timing import measure_machine

    properties = torch.cuda.get_device_properties(0)
    machine = measure_machine(properties.name, float(properties.total_memory), on_gpu=True)
    rates = {key: getattr(machine, key) for key in ("name", "flops", "memory_speed", "memory")}
    return {"rates": rates}


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):  # started by contest.py
        case = json.loads(sys.argv[1])
        about = {"who": case["who"], "size": case["size"]}
        if case["who"] == "rates":
            attempt(about, measure_rates)
        else:
            attempt({**about, "settings": json.dumps(case["setting"])}, lambda: run(case))
    else:
        main()
