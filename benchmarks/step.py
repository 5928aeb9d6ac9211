"""One whole GRPO step, from prompts to new weights: whetstone's beside TRL's with `generate` and with vLLM
colocated, on the same work in one run.

    python benchmarks/step.py --write                          # on a GPU: 1.5 B, 32 prompts x 8 x 512 tokens
    python benchmarks/step.py --only ours,trl_vllm --limit-s 500
    python benchmarks/step.py --cpu --write                    # pebble and SmolLM2-135M on a CPU
    python benchmarks/step.py --table                          # the table of what was kept; --cpu: the CPU's

Prints seconds in generation, scoring, update (old logprobs included) and weight sync, the total, peak memory,
and how many times as fast ours is. Everyone is warmed up with one step and measured twice; the best counts.
TRL's settings are tried in order: on a GPU the first that fits the memory is its row, on a CPU the fastest.
On a CPU every step waits until others leave the cores alone (quiet.py), five minutes at most.
How each is set and run: step_contenders.py.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from contest import HERE, Contest, Row, into_docs, machine, table
from random_model import text_of
from update import embedded, model_folder
from update_work import Work

RESULTS = HERE / "results" / "step.json"
CPU_RESULTS = HERE / "results" / "step_cpu.json"
WHO = ("ours", "trl_generate", "trl_vllm", "trl_vllm_uncorrected", "trl_vllm_float32")
COLUMNS = (
    "size", "who", "generation_s", "scoring_s", "update_s", "sync_s", "total_s", "peak_gb",
    "speedup_over_trl_vllm", "speedup_over_trl_generate",
)  # fmt: skip
IDENTITY = ("who", "size", "settings")
INSTRUCTIONS = (
    "How many pieces of fruit does it sell in a week? Think about the reasoning process first, step by step, "
    "and then give the answer as a single number. Write the reasoning between <think> and </think>, and the "
    "answer between <answer> and </answer>. Check every sum twice before you answer."
)
NUM_BATCHES = 6  # more prompts than the steps need: the mathematics task keeps some back for evaluation

# bf16 weights and AdamW on them: TRL's quickest, though updates of 1e-6 are lost in rounding, which ours are
# not. The memory of an H200 needs neither checkpointing nor vLLM's sleep mode.
PLAIN: Row = {"dtype": "bfloat16", "gradient_checkpointing": False}
COLOCATED: Row = {
    **PLAIN,
    "use_vllm": True,
    "vllm_mode": "colocate",
    "server_gpu_memory_utilization": 0.2,
    "server_max_model_length": 1024,
    "server_enable_sleep_mode": False,
}
SETTINGS: dict[str, list[Row]] = {
    "ours": [{}],
    "trl_generate": [{**PLAIN, "per_device_train_batch_size": size} for size in (32, 16)],
    # vLLM's importance weights are on by default, and cost a pass for old logprobs
    "trl_vllm": [{**COLOCATED, "per_device_train_batch_size": size} for size in (32, 16)],
    "trl_vllm_uncorrected": [
        {**COLOCATED, "per_device_train_batch_size": size, "vllm_importance_sampling_correction": False}
        for size in (32, 16)
    ],
    # TRL's own defaults for weights and corrections: float32 weights computed in bf16, which lose no updates
    "trl_vllm_float32": [
        {**COLOCATED, "dtype": "float32", "per_device_train_batch_size": size} for size in (32, 16)
    ],
}
# The second setting only where a step takes seconds: 32 sequences at once differ by 5 % in time for pebble,
# and take, for SmolLM2, more memory than most machines without a GPU have.
CPU_SETTINGS: dict[str, list[Row]] = {
    "ours": [{}],
    "trl_generate": [
        {"dtype": "float32", "gradient_checkpointing": False, "per_device_train_batch_size": size}
        for size in (8, 32)
    ],
}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default=None, help="default: 1.5b, or with --cpu pebble,smollm2-135m")
    parser.add_argument("--only", default=None, help=",".join(WHO))
    parser.add_argument("--prompts", type=int, default=None)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=None)
    parser.add_argument("--limit-s", type=float, default=None, help="stop after so many seconds")
    parser.add_argument("--write", action="store_true", help="keep the rows in --out")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "whetstone-models")
    parser.add_argument("--cpu", action="store_true", help="pebble and SmolLM2-135M on a CPU")
    parser.add_argument("--table", action="store_true", help="print what was kept, and stop")
    parser.add_argument("--docs", action="store_true", help="with --table: put it into docs/lab/update.md")
    args = parser.parse_args(words)
    out = args.out or (CPU_RESULTS if args.cpu else RESULTS)
    if args.table:
        text = table(fastest(json.loads(out.read_text())["rows"]), COLUMNS)
        return into_docs(out.name, text) if args.docs else print(text)
    if not args.cpu and not torch.cuda.is_available():
        parser.error("there is no GPU here: python benchmarks/step.py --cpu compares on a CPU")
    num_prompts = args.prompts or (4 if args.cpu else 32)
    new_tokens = args.new_tokens or (48 if args.cpu else 512)
    contest = Contest(
        script="step_contenders.py",
        identity=IDENTITY,
        about={
            "machine": machine(),
            "command": "python benchmarks/step.py --write" + (" --cpu" if args.cpu else ""),
            "work": f"{num_prompts} prompts x {args.group} completions of {new_tokens} tokens, all of them; "
            + (
                "prompts of 128-256 tokens of text"
                if args.cpu
                else "prompts of 128-256 tokens, random weights"
            ),
        },
        out=out if args.write else None,
        limit_s=(args.limit_s or (3600.0 if args.cpu else 570.0)) - 10,
        finish=finish,
    )
    settings = CPU_SETTINGS if args.cpu else SETTINGS
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.json"
        for size in (args.sizes or ("pebble,smollm2-135m" if args.cpu else "1.5b")).split(","):
            number = num_prompts * NUM_BATCHES
            model = local_folder(size) if args.cpu else model_folder(size, args.models, contest.left_s)
            prompts.write_text(json.dumps(questions(number, model) if args.cpu else random_words(number)))
            task = {
                "size": size,
                "model": model,
                "device": "cpu" if args.cpu else "cuda",
                "prompts": str(prompts),
                "num_prompts": num_prompts,
                "group": args.group,
                "new_tokens": new_tokens,
            }
            for who in args.only.split(",") if args.only else settings:
                tried = settings[who][:1] if size != "pebble" and args.cpu else settings[who]
                compete(contest, {**task, "who": who}, tried, every=args.cpu)
    print(table(contest.rows, COLUMNS))


def compete(contest: Contest, task: Row, settings: list[Row], *, every: bool) -> None:
    """Each setting in a process of its own; unless `every` is wanted, until one fits."""
    for setting in settings:
        contest.run({**task, "setting": setting})
        if not every and contest.rows and "total_s" in contest.rows[-1]:
            break


def random_words(number: int) -> list[Row]:
    return [
        {"question": text_of(prompt), "answer": "1"} for prompt in Work("full", num_prompts=number).prompts()
    ]


def questions(number: int, model: str) -> list[Row]:
    """Text of 128-256 tokens of the model's own tokenizer, no two alike: what reasoning recipes have, with
    their instructions in front of every question.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = []
    for i, prompt in enumerate(Work("full", num_prompts=number).prompts()):
        text = f"Question {i}: a shop sells {3 + i} apples and {7 * i + 2} pears a day. " + INSTRUCTIONS
        while len(ids := tokenizer(text)["input_ids"]) < len(prompt):
            text += " " + INSTRUCTIONS
        rows.append(
            {"question": tokenizer.decode(ids[: len(prompt)], skip_special_tokens=True), "answer": "1"}
        )
    return rows


def local_folder(name: str) -> str:
    if name == "pebble":
        return embedded()
    from whetstone.model.hub import resolve

    return str(resolve(name))


def fastest(rows: list[Row]) -> list[Row]:
    """Everyone's best setting on every model, in the order of the list."""
    best: dict[tuple, Row] = {}
    for row in rows:
        key = (row["size"], row["who"])
        if "total_s" in row and row["total_s"] < best.get(key, {"total_s": float("inf")})["total_s"]:
            best[key] = row
    return [best[key] for key in sorted(best, key=lambda key: (key[0], WHO.index(key[1])))]


def finish(rows: list[Row]) -> None:
    """How many times as fast each is as the best of TRL's, on the same model; with vLLM its best is the
    fastest of all that were tried, corrected or not.
    """
    for rival in ("trl_vllm", "trl_generate"):
        for row in rows:
            times = [
                other["total_s"]
                for other in rows
                if other["who"].startswith(rival) and other["size"] == row["size"] and "total_s" in other
            ]
            if times and "total_s" in row:
                row[f"speedup_over_{rival}"] = round(min(times) / row["total_s"], 2)


if __name__ == "__main__":
    main()
