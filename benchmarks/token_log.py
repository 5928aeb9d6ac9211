"""What writing tokens (`log_tokens_groups`) costs of a step of the quickstart.

    python benchmarks/token_log.py                                   one run of 20 steps
    python benchmarks/token_log.py --against 4                       and 4 runs with and 4 without
    python benchmarks/token_log.py --config gsm8k max_steps=10       another configuration and settings

The share is the time in the functions that keep and write tokens over the time of the steps: both are of one
run, so that other programs on the machine slow both. `--against` compares processor seconds of whole steps,
the least of the repeats; OMP_NUM_THREADS=1 keeps threads that wait out of them.
"""

import argparse
import functools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SHORT = ("max_steps=20", "eval_num_samples=0", "preflight=off", "save_strategy=no", "watch=false")
GROUPS = 4


def timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - begin)

    return call


def train_once(config: str, settings: list[str]) -> None:
    """In a process of its own: prints the seconds of steps, of writing, and the bytes on disk."""
    from whetstone.config import load
    from whetstone.run.token_log import TokenLog
    from whetstone.train import train
    from whetstone.update.token_table import TokenTable

    seconds: list[float] = []
    ends: list[float] = []  # processor seconds of this process after each step
    for owner, name in ((TokenLog, "write"), (TokenTable, "add")):
        setattr(owner, name, timed(getattr(owner, name), seconds))
    write = TokenLog.write

    def write_and_mark(*args: Any) -> None:
        write(*args)
        ends.append(time.process_time())

    setattr(TokenLog, "write", write_and_mark)  # noqa: B010
    with tempfile.TemporaryDirectory() as folder:
        train(load(config, [f"output_dir={folder}", "run_name=run", *SHORT, *settings]))
        run = Path(folder) / "run"
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        size = sum(path.stat().st_size for path in (run / "completions").glob("tokens_*.npz"))
    steps = [row["step_time"] for row in rows if row["kind"] == "train"]
    processor = (ends[-1] - ends[0]) / (len(ends) - 1)
    print(json.dumps({"steps": steps, "tokens_s": sum(seconds), "bytes": size, "processor_s": processor}))


def measure(groups: int, config: str, settings: list[str]) -> dict[str, Any]:
    words = [*settings, f"log_tokens_groups={groups}"]
    command = [sys.executable, __file__, "--child", "--config", config, *words]
    lines = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    result = json.loads(lines.splitlines()[-1])
    mean = sum(result["steps"]) / len(result["steps"])
    print(
        f"log_tokens_groups={groups}: {mean:.3f} s, {result['processor_s']:.3f} s of processor a step",
        flush=True,
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--config", default="quickstart")
    parser.add_argument("--against", type=int, default=0, metavar="N")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("settings", nargs="*")
    args = parser.parse_args()
    if args.child:
        return train_once(args.config, args.settings)
    result = measure(GROUPS, args.config, args.settings)
    count, seconds = len(result["steps"]), result["tokens_s"]
    share = 100 * seconds / sum(result["steps"])
    size = result["bytes"] / count / 1e3
    print(f"{1e3 * seconds / count:.2f} ms for tokens, {share:.2f} % of a step; {size:.1f} kB a step on disk")
    processor: dict[int, list[float]] = {0: [], GROUPS: []}
    for repeat in range(args.against):
        for groups in (0, GROUPS) if repeat % 2 else (GROUPS, 0):
            processor[groups].append(measure(groups, args.config, args.settings)["processor_s"])
    if args.against:
        without, with_tokens = (min(values) for values in processor.values())
        print(
            f"{100 * (with_tokens / without - 1):+.2f} % with tokens, the least of {args.against} runs each"
        )


if __name__ == "__main__":
    main()
