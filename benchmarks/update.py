"""Speed and memory of one optimizer step: whetstone's packed update beside the padded way and TRL's, on the
same completions in one run.

    python benchmarks/update.py --write                        # on a GPU: 0.5 B, 1.5 B and 3 B
    python benchmarks/update.py --only ours,trl --sizes 1.5b --limit-s 500
    python benchmarks/update.py --only ours --sizes 1.5b --shapes gsm8k --settings 1 \
        --ours use_peft=true,lora_r=16,lora_alpha=32,lora_dropout=0,micro_batch_tokens=32768
    python benchmarks/update.py --sizes 1.5b --shapes klong    # prompts with a system message of 367 tokens
    python benchmarks/update.py --cpu                          # the embedded model, small, to try it out
    python benchmarks/update.py --table                        # the table of what was kept

Prints seconds, tokens/s, the share of the matrix rate (6 N operations for each token that is run, 4 N beneath
LoRA, padding not counted; the rate of one large product measured in the same run) and peak memory. Everyone
is warmed up with one step and measured twice; the best counts. Settings are tried one after another and every
one is a row: the table shows the fastest. What is run: update_contenders.py; on what: update_work.py.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from contest import HERE, Contest, Row, into_docs, machine, matrix_rate, start, table
from rollout_work import EXPERTS, KLONG_ANSWER, KLONG_OWN, KLONG_SHARED, SIZES
from update_work import Work, asdict

RESULTS = HERE / "results" / "update.json"
WHO = ("ours", "padded", "trl")
COLUMNS = (
    "size", "shape", "who", "setting", "seconds", "tokens_per_s", "share_of_matrix_rate", "share_by_work",
    "peak_gb",
)  # fmt: skip
IDENTITY = ("who", "size", "shape", "setting")
SETTINGS: dict[str, list[Row]] = {
    "ours": [{}, {"gradient_checkpointing": True}],
    "padded": [
        {"micro_batch": size, "gradient_checkpointing": recompute}
        for size, recompute in ((16, False), (8, False), (32, True))
    ],
    "trl": [
        {"per_device_train_batch_size": size, "gradient_checkpointing": recompute}
        for size, recompute in ((32, False), (16, False), (64, True))
    ],
}
LENGTHS = {  # of other shapes than ragged and full: about those of Qwen2.5-Coder-1.5B on these recipes
    "gsm8k": {"num_prompts": 64, "group": 16, "prompt_tokens": (100, 200), "new_tokens": (160, 480)},
    "klong": {
        "num_prompts": 32,
        "group": 16,
        "prompt_tokens": tuple(KLONG_SHARED + own for own in KLONG_OWN),
        "new_tokens": KLONG_ANSWER,
        "shared_tokens": KLONG_SHARED,
    },
}
SMALL = {
    "num_prompts": 4, "group": 4, "prompt_tokens": (16, 32), "new_tokens": (4, 32), "vocabulary": 100,
}  # fmt: skip
SMALL_LENGTHS = {"klong": {**SMALL, "prompt_tokens": (110, 130), "shared_tokens": 100}}
SMALL_SETTINGS: dict[str, list[Row]] = {
    "ours": [{}, {"gradient_checkpointing": True}],
    "padded": [{"micro_batch": 8, "gradient_checkpointing": False}],
    "trl": [{"per_device_train_batch_size": 8, "gradient_checkpointing": False}],
}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default=",".join(SIZES), help="0.5b,1.5b,3b,8b-a1b")
    parser.add_argument("--only", default=",".join(WHO), help="ours,padded,trl")
    parser.add_argument("--shapes", default="ragged,full")
    parser.add_argument("--ours", action="append", default=[], metavar="key=value,...",
                        help="one more setting of ours, tried first")  # fmt: skip
    parser.add_argument("--settings", type=int, default=3, help="of each contender, the first so many")
    parser.add_argument("--limit-s", type=float, default=570.0, help="stop after so many seconds")
    parser.add_argument("--write", action="store_true", help="keep the rows in --out")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "whetstone-models")
    parser.add_argument("--cpu", action="store_true", help="the embedded model on a CPU, small")
    parser.add_argument("--table", action="store_true", help="print what was kept, and stop")
    parser.add_argument("--docs", action="store_true", help="with --table: put it into docs/lab/update.md")
    args = parser.parse_args(words)
    if args.table:
        text = table(fastest(json.loads(args.out.read_text())["rows"]), COLUMNS)
        return into_docs("update.json", text) if args.docs else print(text)
    if not args.cpu and not torch.cuda.is_available():
        parser.error("there is no GPU here: python benchmarks/update.py --cpu tries it on a CPU")
    device = "cpu" if args.cpu else "cuda"
    rate = matrix_rate(device)
    print(f"{machine()}: matrix product {rate / 1e12:,.4g} TFLOP/s", flush=True)
    lengths, default = (SMALL_LENGTHS, SMALL) if args.cpu else (LENGTHS, {})
    works = [Work(shape, **lengths.get(shape, default)) for shape in args.shapes.split(",")]
    contest = Contest(
        script="update_contenders.py",
        identity=IDENTITY,
        about={
            "machine": machine(),
            "matrix_tflops": round(rate / 1e12, 4),
            "command": "python benchmarks/update.py --write" + (" --cpu" if args.cpu else ""),
            "work": works[0].words(),
        },
        out=args.out if args.write else None,
        limit_s=args.limit_s - 10,
        finish=lambda rows: finish(rows, rate),
    )
    settings = SMALL_SETTINGS if args.cpu else SETTINGS
    settings = {**settings, "ours": [*map(parse, args.ours), *settings["ours"]]}
    for size in ["pebble"] if args.cpu else args.sizes.split(","):
        model = "pebble" if args.cpu else model_folder(size, args.models, contest.left_s)
        for who in args.only.split(","):
            contest.run(
                {
                    "who": who,
                    "size": size,
                    "model": embedded() if args.cpu and who != "ours" else model,
                    "device": device,
                    "works": [asdict(work) for work in works],
                    "settings": settings[who][: args.settings],
                }
            )
    print(table(contest.rows, COLUMNS))


def parse(text: str) -> Row:
    """`micro_batch_tokens=32768,gradient_checkpointing=true` -> a setting."""
    pairs = (pair.split("=", 1) for pair in text.split(","))
    return {key: json.loads(value) for key, value in pairs}


def model_folder(size: str, parent: Path, limit_s: float) -> str:
    """The random model of a size, made in a process of its own, once."""
    folder = parent / size
    start("random_model.py", {"who": "model", "size": size, "folder": str(folder)}, limit_s)
    return str(folder)


def embedded() -> str:
    from whetstone.model.hub import resolve

    return str(resolve("pebble"))


def finish(rows: list[Row], rate: float) -> None:
    """Tokens a second and shares of the matrix rate."""
    for row in rows:
        if "seconds" not in row:
            continue
        possible = row["seconds"] * row.setdefault("matrix_tflops", round(rate / 1e12, 4)) * 1e12
        row["tokens_per_s"] = round(row["tokens"] / row["seconds"])
        frozen = row["parameters"] - row.get("trained", row["parameters"])
        operations = 6 * row["parameters"] - 2 * frozen
        row["share_of_matrix_rate"] = round(operations * row["tokens_run"] / possible, 4)
        row["share_by_work"] = round(operations * row["tokens"] / possible, 4)


def fastest(rows: list[Row]) -> list[Row]:
    """Of every contender on every work its fastest row, and ours with checkpointing too: that is the choice
    between speed and memory.
    """
    best: dict[tuple, Row] = {}
    for row in rows:
        recomputed = row["who"] == "ours" and "gradient_checkpointing" in row.get("setting", "")
        key = (row["size"], row.get("shape"), row["who"], recomputed)
        if "seconds" in row and row["seconds"] < best.get(key, {"seconds": float("inf")})["seconds"]:
            best[key] = row
    order = [*SIZES, *EXPERTS, "pebble"]
    return [best[key] for key in sorted(best, key=lambda key: (order.index(key[0]), key[1], key[2], key[3]))]


if __name__ == "__main__":
    main()
