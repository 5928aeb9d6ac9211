"""Runs the commands of the recipe pages one after the other, and writes what they came to into the pages.

python benchmarks/recipes.py --list
python benchmarks/recipes.py --model FOLDER --data FOLDER_OF_GSM8K --output RUNS --only klong klong_sft
                              runs them; a failure does not stop the next. RUNS/recipes.json has the results.
                              --parallel 3 runs three at a time, for small batches; their times say little.
                              Kernels of several runs run side by side behind nvidia-cuda-mps-control -d
python benchmarks/recipes.py --render [RUNS/recipes.json]
                              keeps these runs in results/learning, draws pictures, fills the pages' tables
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import learning
from contest import into_docs
from recipe_plan import PLAN, Run

from whetstone.terminal.text import escape_controls

PAGES = learning.PICTURES
NOT_RUN = "not yet run on a GPU"
COLUMNS = ("run", "steps", "sampled", "greedy", "pass@k", "time", "rollout", "MFU")
# `whet` with a share of the GPU's memory, so that runs at a time leave each other theirs.
CAPPED = """
import runpy, sys
import torch
if torch.cuda.is_available():
    torch.cuda.set_per_process_memory_fraction(float(sys.argv[1]))
sys.argv = ["whet", *sys.argv[2:]]
runpy.run_module("whetstone", run_name="__main__")
"""
EXAMPLES = 3  # problems whose answers before and after are written to examples.txt


def words_of(run: Run, args: argparse.Namespace) -> list[str]:
    """What `whet` gets: the documented command with the folders of this machine."""
    words = [
        re.sub("=outputs/(q/)?", f"={args.output}/", word.replace("=gsm8k/", f"={args.data}/"))
        for word in shlex.split(run.command)[1:]
    ]
    if run.start is None:
        words.append(f"model_name_or_path={args.model}")
    words = [word for word in words if not word.startswith("run_name=")]
    words += [f"run_name={run.name}", f"output_dir={args.output}", "overwrite_output_dir=true"]
    return [*words, "save_strategy=no", *args.settings]


def execute(run: Run, args: argparse.Namespace) -> dict[str, Any]:
    """One run in a process of its own; what is left of it, or why it failed."""
    log, start = args.output / f"{run.name}.log", time.monotonic()
    with log.open("w", encoding="utf-8") as stream:
        command = [sys.executable, "-m", "whetstone", *words_of(run, args)]
        if args.parallel > 1:
            command[1:3] = ["-c", CAPPED, f"{0.96 / args.parallel:.3f}"]
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(args.limit)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # it writes what it has
            try:
                code = process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                code = process.wait()
    result: dict[str, Any] = {"command": run.command, "seconds": round(time.monotonic() - start, 1)}
    result |= {"parallel": args.parallel} if args.parallel > 1 else {}
    if code != 0:
        result["error"] = f"exit code {code}"
        print(escape_controls("\n".join(log.read_text(encoding="utf-8").splitlines()[-15:])))
    if (args.output / run.name / "metrics.jsonl").is_file():
        result |= learning.reduce_run(args.output / run.name)
    return result


def run_plan(runs: list[Run], args: argparse.Namespace) -> bool:
    """Whether all of them ran and none failed."""
    args.output.mkdir(parents=True, exist_ok=True)
    file, start = args.results or args.output / "recipes.json", time.monotonic()
    results = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    starts, lock = {run.start for run in PLAN}, threading.Lock()

    def complete(run: Run) -> bool:
        reason = obstacle(run, args, time.monotonic() - start)
        if reason is not None:
            print(f"{run.name}: left out, {reason}", flush=True)
            return False
        result = execute(run, args)
        with lock:
            results[run.name] = result
            file.write_text(json.dumps(results) + "\n", encoding="utf-8")
            write_examples(run, args.output, file.with_name("examples.txt"))
        if run.name not in starts and not args.keep_models:
            shutil.rmtree(args.output / run.name / "final_model", ignore_errors=True)  # gigabytes
        print(f"{run.name}: {summary(result)}", flush=True)
        return "error" not in result

    return run_all(runs, complete, args.parallel)


def run_all(runs: list[Run], complete: Callable[[Run], bool], parallel: int) -> bool:
    """`complete` each run, several at a time; one that starts from another's model comes after that one."""
    waiting, changed = list(runs), threading.Condition()
    unfinished, successes = {run.name for run in runs}, []

    def next_run() -> Run | None:
        with changed:
            while waiting:
                ready = next((run for run in waiting if run.start not in unfinished), None)
                if ready is not None:
                    waiting.remove(ready)
                    return ready
                changed.wait()
        return None

    def work() -> None:
        while (run := next_run()) is not None:
            success = False
            try:
                success = complete(run)
            finally:
                with changed:
                    successes.append(success)
                    unfinished.discard(run.name)
                    changed.notify_all()

    with ThreadPoolExecutor(parallel) as pool:
        for future in [pool.submit(work) for _ in range(parallel)]:
            future.result()
    return all(successes)


def obstacle(run: Run, args: argparse.Namespace, elapsed_s: float) -> str | None:
    if run.start is not None and not (args.output / run.start / "final_model").is_dir():
        return f"there is no model of {run.start}"
    if args.budget is not None and elapsed_s + run.seconds > args.budget:
        return f"its {run.seconds} s are more than is left of {args.budget:.0f} s"
    return None


def summary(result: dict[str, Any]) -> str:
    points = result.get("eval", [])
    change = f", {interval(points[0])} to {interval(points[-1])}" if points else ""
    return f"{result.get('error', 'done')} in {result['seconds']:.0f} s{change}"


def write_examples(run: Run, output: Path, target: Path) -> None:
    """The same problems before and after, to read; text of a model, so control characters are escaped."""
    files = sorted(output.glob(f"{run.name}/eval_results/*.json"), key=lambda path: path.stat().st_mtime)
    with target.open("a", encoding="utf-8") as stream:
        for file in files[:1] + files[1:][-1:]:
            for entry in json.loads(file.read_text(encoding="utf-8"))["completions"][:EXAMPLES]:
                verdict = f"{run.name} {file.stem} {entry['problem']} correct: {entry['correct']}"
                stream.write(f"==== {verdict}\n{escape_controls(entry['completion'])}\n")


# --- the pages ---


def interval(point: dict[str, Any], name: str = "accuracy") -> str:
    if point.get(name) is None:
        return "-"
    mean, low, high = (100 * point[key] for key in (name, f"{name}_low", f"{name}_high"))
    return f"{mean:.1f} % [{low:.1f}, {high:.1f}]"


def change(values: Iterable[str]) -> str:
    """Before and after, those that the run has."""
    return " to ".join(value for value in values if value != "-") or "-"


def table(runs: list[Run], results: dict[str, dict[str, Any]]) -> str:
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for run in runs:
        result = results.get(run.label)
        cells = [NOT_RUN] + ["-"] * (len(COLUMNS) - 2) if result is None else _cells(result)
        lines.append(f"| {' | '.join([run.label, *cells])} |")
    notes = [_notes(run, results[run.label]) for run in runs if run.label in results]
    return "\n".join([*lines, "", *notes] if any(notes) else lines)


def _cells(result: dict[str, Any]) -> list[str]:
    points, speed = result["eval"], result["speed"]
    ends = points[:1] + points[1:][-1:]
    ks = list(ends[0].get("pass_at_k", {}))[1:]
    passes = [", ".join(f"@{k} {100 * point['pass_at_k'][k]:.1f} %" for k in ks) for point in ends]
    samples = result["train"][-1][2] is not None  # supervised steps do not, and have no accuracy
    rate = speed.get("rollout_tokens_per_s") if samples else None
    return [
        str(result["train"][-1][0]),
        change(map(interval, ends)),
        change(interval(point, "greedy_accuracy") for point in ends),
        change(passes) if ks else "-",
        f"{result['seconds']:.0f} s"
        + (f" ({result['parallel']} runs at a time)" if "parallel" in result else ""),
        "-" if rate is None else f"{rate / 1000:.1f} k tokens/s",
        f"{100 * speed['mfu']:.0f} %" if "mfu" in speed else "-",
    ]


def _notes(run: Run, result: dict[str, Any]) -> str:
    """Accuracy by task, where there are several."""
    before, after = result["eval"][0]["tasks"], result["eval"][-1]["tasks"]
    tasks = ", ".join(f"{name} {100 * before[name]:.0f} to {100 * after[name]:.0f} %" for name in before)
    return f"- {run.label}, sampled, by task: {tasks}." if tasks else ""


def block(figure: str, runs: list[Run]) -> str:
    """The commands of a figure, its picture where there are runs, and its table."""
    lines = [line for run in runs for line in _wrapped(run.command)]
    commands = "\n".join(["```bash", *lines, "```", "", ""])
    kept = learning.kept_runs(learning.RESULTS / figure)
    results = {name: run for name, run in kept.items() if "seconds" in run}
    if not results:
        return commands + table(runs, {})
    first = next(iter(results.values()))["session"]
    machine = ", ".join(first["machine"]["gpus"]) or first["machine"]["system"]
    software = f"{machine}, torch {first['torch']}, transformers {first['transformers']}"
    head = f"{first['started'][:10]}, {software}; before and after, 95 % intervals; time with set-up."
    picture = f"![Accuracy over minutes and steps]({figure}.png)"
    return f"{commands}{picture}\n\n{head}\n\n{table(runs, results)}"


def _wrapped(command: str) -> list[str]:
    """A command as lines that a shell joins; a word with quotes stays whole."""
    lines = [""]
    for word in re.findall(r"(?:'[^']*'|\S)+", command):
        if len(lines[-1]) + len(word) > 105:
            lines[-1] += " \\"
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {word}" if lines[-1] else word
    return lines


def figures() -> dict[str, list[Run]]:
    names = dict.fromkeys(figure for run in PLAN for figure in run.figures)
    return {
        name: [replace(run, label=run.figures[name]) for run in PLAN if name in run.figures] for name in names
    }


def render(file: Path) -> None:
    results = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    for run in PLAN:
        result = results.get(run.name)
        if result is not None and "error" not in result and result.get("eval"):
            for figure, label in run.figures.items():
                learning.keep(figure, label, result)
    learning.draw_all()
    for figure, runs in figures().items():
        into_docs(figure, block(figure, runs), PAGES / f"{runs[0].page}.md")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--list", action="store_true", help="the runs with their estimated seconds")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these runs, in the order of the plan")
    parser.add_argument("--model", default="Qwen/Qwen2.5-Coder-1.5B-Instruct")
    parser.add_argument(
        "--data", type=Path, default=Path("gsm8k"), help="folder with train.jsonl, test.jsonl"
    )
    parser.add_argument("--output", type=Path, default=Path("outputs"), help="run folders and recipes.json")
    parser.add_argument("--results", type=Path, metavar="JSON", help="instead of OUTPUT/recipes.json")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="start no run that would end later")
    parser.add_argument("--limit", type=float, default=420, metavar="SECONDS", help="for one run")
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="runs at a time on one GPU")
    parser.add_argument("--keep-models", action="store_true", help="delete no models")
    parser.add_argument("--render", type=Path, nargs="?", const=Path(), metavar="JSON", help="fill the pages")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="appended to every command")
    args = parser.parse_intermixed_args(argv)
    if args.render is not None:
        render(args.render)
        return 0
    unknown = set(args.only or ()) - {run.name for run in PLAN}
    if unknown:
        parser.error(f"there is no run {', '.join(sorted(unknown))}: see --list")
    runs = [run for run in PLAN if not args.only or run.name in args.only]
    if args.list:
        for run in runs:
            print(f"{run.name:22s} {run.page:14s} {run.seconds:4d} s  {run.command}")
        print(f"{len(runs)} runs, about {sum(run.seconds for run in runs) / 60:.0f} minutes on one H200")
        return 0
    return 0 if run_plan(runs, args) else 1


if __name__ == "__main__":
    raise SystemExit(main())
