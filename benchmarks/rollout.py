"""Rollout speed: the native engine beside model.generate, transformers' continuous batching, vLLM and SGLang,
on the same work in one run.

    python benchmarks/rollout.py                               # on a GPU: 0.5 B, 1.5 B and 3 B, every work
    python benchmarks/rollout.py --size 1.5b --who native vllm
    SGLANG_PYTHON=.venv-sglang/bin/python python benchmarks/rollout.py --size 1.5b --who native sglang
    python benchmarks/rollout.py --cpu --model smollm2-135m --new-tokens 48     # on a CPU
    python benchmarks/rollout.py --table                       # the table of what was kept

Prints tokens/s, the ratio to vLLM, the share of the memory floor, peak memory and set-up seconds; `--write`
keeps the rows with date, machine and versions in benchmarks/results. What the works are: rollout_work.py;
how each engine is set: rollout_contenders.py; the CPU's: rollout_cpu.py.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from rollout_work import EXPERTS, NEW_TOKENS, SIZES, works_of

RESULTS = Path(__file__).parent / "results" / "rollout.json"
# Engines that take minutes: on one work, and with fewer tokens where even that is too long.
ONLY_SMALL = {"generate": 512, "continuous batching": 64}
# 8 bits are another model for everyone who rounds: rows of their own, at one size.
EIGHT_BITS = ["native fp8", "vllm fp8"]
WHO = ["native", "vllm", *ONLY_SMALL, *EIGHT_BITS]
OPTIONAL = ["sglang"]  # only where it is named: it has an environment of its own (SGLANG_PYTHON)
COLUMNS = ["who", "size", "num_sequences", "shape", "tokens_per_s", "ratio_to_vllm", "share_of_floor",
           "peak_gb", "setup_s"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", nargs="+", default=list(SIZES), choices=[*SIZES, *EXPERTS])
    parser.add_argument("--who", nargs="+", default=WHO, choices=[*WHO, *OPTIONAL])
    parser.add_argument(
        "--generate-tokens", type=int, default=NEW_TOKENS, help="new tokens of model.generate"
    )
    parser.add_argument("--write", action="store_true", help="keep the rows in benchmarks/results")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print what was kept, and stop")
    parser.add_argument("--cpu", action="store_true", help="the CPU's comparison; see --cpu --help")
    args, rest = parser.parse_known_args()
    if args.cpu:
        from rollout_cpu import main as on_cpu

        return on_cpu([*rest, *(["--write"] if args.write else [])])
    if args.table:
        return print(table(json.loads(args.out.read_text())["rows"]))
    if not torch.cuda.is_available():
        parser.error("there is no GPU here: python benchmarks/rollout.py --cpu compares on the CPU")
    ONLY_SMALL["generate"] = args.generate_tokens
    bytes_per_s = copy_rate()
    print(f"copy: {bytes_per_s / 1e12:.2f} TB/s", flush=True)
    rows: list[dict] = []
    for size in args.size:
        for who in args.who:
            rows += run(who, size)
            if args.write:  # after each: an hour of measuring is not lost to the last one
                keep(rows, args, bytes_per_s)
    finish(rows, bytes_per_s)
    print(table(rows))


def run(who: str, size: str) -> list[dict]:
    """All works of one engine at one size, in a process of its own."""
    works = [(work.num_sequences, work.shape, work.new_tokens) for work in works_of(size)]
    if who in ONLY_SMALL:
        works = [(256, "full", ONLY_SMALL[who])] if size == "1.5b" else []
    if who in EIGHT_BITS and size != "1.5b":
        works = []
    if not works:
        return []
    command = [sys.executable, "rollout_contenders.py", who, size, json.dumps(works)]
    here = Path(__file__).resolve().parent
    paths = os.pathsep.join([str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths}
    process = subprocess.Popen(command, cwd=here, env=environment, stdout=subprocess.PIPE, text=True)
    rows = []
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("ROW "):
            rows.append(json.loads(line[4:]))
            print(json.dumps(rows[-1]), flush=True)
    if process.wait() != 0:
        print(f"{who} at {size} failed with exit code {process.returncode}: see above", flush=True)
    return rows


def copy_rate() -> float:
    """Bytes a second that a copy on the device moves, read and written: the memory's ceiling."""
    source = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for number in range(13):
        if number == 3:
            begun.record()
        target.copy_(source)
    ended.record()
    torch.cuda.synchronize()
    return 10 * 2 * source.numel() * 2 / (begun.elapsed_time(ended) / 1000)


def finish(rows: list[dict], bytes_per_s: float) -> None:
    """Ratios: to vLLM with logprobs on the same work (in 8 bits to vLLM in 8 bits; none if there were fewer
    tokens), and to the memory's floor in 16 bits.
    """
    from rollout_work import Work

    vllm = {(*key_of(row), row["who"] in EIGHT_BITS): row["tokens_per_s"]
            for row in rows if row["who"] in ("vllm", "vllm fp8")}  # fmt: skip
    for row in rows:
        work = Work(row["size"], row["num_sequences"], row["shape"], row.get("new_tokens", NEW_TOKENS))
        key = (*key_of(row), row["who"] in EIGHT_BITS)
        if key in vllm and work.new_tokens == NEW_TOKENS:
            row["ratio_to_vllm"] = round(row["tokens_per_s"] / vllm[key], 2)
        row["share_of_floor"] = round(work.floor_s(bytes_per_s) / row["seconds"], 3)


def key_of(row: dict) -> tuple:
    return row["size"], row["num_sequences"], row["shape"]


def table(rows: list[dict]) -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        cells = [row.get(column, "") for column in COLUMNS]
        lines.append("| " + " | ".join(f"{c:,}" if isinstance(c, int) else str(c) for c in cells) + " |")
    return "\n".join(lines)


def keep(rows: list[dict], args: argparse.Namespace, bytes_per_s: float) -> None:
    """New rows replace those of the same engine and work; the others stay, with their own date."""
    stamp = {"date": time.strftime("%Y-%m-%d"), "versions": versions()}
    for row in rows:
        row |= stamp
    before = json.loads(args.out.read_text()) if args.out.is_file() else {"rows": []}
    new = {(row["who"], *key_of(row)) for row in rows}
    others = [row for row in before["rows"] if (row["who"], *key_of(row)) not in new]
    rows, sizes = others + rows, [*SIZES, *EXPERTS]
    rows.sort(key=lambda row: (sizes.index(row["size"]), row["num_sequences"], row["shape"], row["who"]))
    finish(rows, bytes_per_s)
    caution = {"caution": before["caution"]} if others and "caution" in before else {}
    result = {
        **caution,  # somebody's word on rows that are still there
        "machine": f"{torch.cuda.get_device_name()}, {platform.machine()}",
        "copy_tb_per_s": round(bytes_per_s / 1e12, 2),
        "command": "python benchmarks/rollout.py --write",
        "work": "Qwen2.5 shapes, random bf16 weights; groups of 8 share a prompt of 128-256 tokens; 512 new "
        "tokens, all of them (full) or lognormal lengths (ragged, median 160); long: 8 prompts of 15,872",
        "rows": rows,
    }
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


def versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "transformers", "triton", "vllm"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main()
