"""Makes parts of README.md: the block of the quickstart's output, docs/report.png, the table of GPU needs.

    python scripts/make_readme.py                                run the quickstart (minutes), then write all
    python scripts/make_readme.py --run FOLDER --output FILE     from a run that has ended and what it printed
    python scripts/make_readme.py --needs                        the table of GPU needs alone

The picture is a screenshot by Chromium; without it the block alone is written, and the script says so.
Changes no other part of README.md.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from whetstone.config import build, load, make_plan  # noqa: E402
from whetstone.cost.estimate import GPU_SIZES_GB, MAX_FITTING_SHARE, estimate  # noqa: E402
from whetstone.cost.prompts import Prompts  # noqa: E402
from whetstone.cost.shape import model_shape  # noqa: E402

README, PICTURE = ROOT / "README.md", ROOT / "docs" / "report.png"
SHOWN_STEPS = (1, 10, 30)
SIZE = (1200, 1485)
MODELS = ("0.5B", "1.5B", "3B", "7B", "14B", "32B")  # of Qwen2.5
WORK = {
    "bf16": True,
    "prompts_per_step": 16,
    "num_generations": 8,
    "max_completion_length": 1024,
    "max_steps": 1,
}
PROMPTS = Prompts(tokens=200, num_problems=10_000, source="")
NEEDS = {
    "every weight": {},
    "`optim=adamw_8bit cpu_offload=optimizer`": {"optim": "adamw_8bit", "cpu_offload": "optimizer"},
    "LoRA: `use_peft=true`": {"use_peft": True},
    "QLoRA: `use_peft=true load_in_4bit=true`": {"use_peft": True, "load_in_4bit": True},
}


def plan_lines() -> list[str]:
    """What the quickstart says of itself before it begins."""
    config = load("quickstart").config
    return make_plan(config, num_problems=config.tasks.dataset_size).lines(config)


def block(lines: list[str]) -> list[str]:
    """The lines of a quickstart's output that README.md shows, with an ellipsis where some are left out."""
    shown = []
    plan = set(plan_lines())
    results = 0  # lines of the before and after that are still to come
    for line in lines:
        step = re.match(r"step (\d+)/\d+\b", line)
        if re.match(r"On [\d,]+ problems", line):
            results = 3
        keep = (
            line in plan
            or re.match(r"\S+: [\d,]+ parameters", line) is not None
            or (step is not None and int(step[1]) in SHOWN_STEPS)
            or results > 0
            or re.match(r"[\d,]+ steps? in ", line) is not None
        )
        results -= results > 0
        if keep:
            shown.append(line)
        elif shown and shown[-1] != "...":
            shown.append("...")
    while shown and shown[-1] == "...":
        shown.pop()
    # The numbers of the steps say that some are left out.
    is_step = [line.startswith("step ") for line in shown]
    between = {i for i in range(1, len(shown) - 1) if shown[i] == "..." and is_step[i - 1] and is_step[i + 1]}
    return [line for i, line in enumerate(shown) if i not in between]


def shown_block(text: str) -> list[str]:
    """The block as it stands in a README: the first code block under "What you see"."""
    after = text[text.index("## What you see") :]
    return after.split("```")[1].strip("\n").splitlines()


def with_block(text: str, lines: list[str]) -> str:
    """The README with another block."""
    start = text.index("```", text.index("## What you see"))
    end = text.index("```", start + 3)
    return f"{text[:start]}```\n" + "\n".join(lines) + f"\n{text[end:]}"


def needs_table() -> list[str]:
    """The smallest GPU for each model and way to train it, by `whet plan`."""
    rows = [f"| GB of one GPU, 16 prompts x 8 x 1,024 tokens | {' | '.join(MODELS)} |"]
    rows.append("|---" * (1 + len(MODELS)) + "|")
    for name, change in NEEDS.items():
        config = build({**WORK, **change})
        cells = []
        for model in MODELS:
            shape = model_shape(f"Qwen/Qwen2.5-{model}-Instruct")
            sizes = (
                size
                for size in (8, 12, *GPU_SIZES_GB)
                if estimate(config, shape, PROMPTS, capacity=MAX_FITTING_SHARE * size * 1e9).memory.fits
            )
            cells.append(str(next(sizes, "more")))
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return rows


def with_needs(text: str, rows: list[str]) -> str:
    """The README with another table of needs, which is where the old one is."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| GB of one GPU"))
    end = next(number for number in range(start, len(lines)) if not lines[number].startswith("|"))
    return "\n".join([*lines[:start], *rows, *lines[end:]]) + "\n"


def run_quickstart(folder: Path) -> tuple[Path, list[str]]:
    """The run folder, and what was printed (into a pipe, so that every step has a line)."""
    command = [sys.executable, "-u", "-m", "whetstone", "train", "quickstart", f"output_dir={folder}"]
    lines = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip("\n"))
    if process.returncode:
        sys.exit(f"The quickstart ended with exit code {process.returncode}: README.md is as it was.")
    return folder / "quickstart", lines


def take_picture(report: Path, picture: Path) -> bool:
    """A screenshot of the report; False without a Chromium."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        return False
    with tempfile.TemporaryDirectory() as profile:
        flags = "--headless --no-sandbox --disable-gpu --disable-background-networking --disable-sync"
        flags += " --disable-component-update --no-first-run --hide-scrollbars --force-device-scale-factor=1"
        place = [
            f"--user-data-dir={profile}",
            f"--window-size={SIZE[0]},{SIZE[1]}",
            f"--screenshot={picture}",
        ]
        command = [browser, *flags.split(), *place, report.resolve().as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=180)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--run", type=Path, help="the folder of a quickstart that has ended")
    parser.add_argument("--output", type=Path, help="what it printed")
    parser.add_argument("--needs", action="store_true", help="write the table of GPU needs alone")
    given = parser.parse_args()
    README.write_text(with_needs(README.read_text(encoding="utf-8"), needs_table()), encoding="utf-8")
    if given.needs:
        return
    if (given.run is None) != (given.output is None):
        parser.error("--run and --output belong together")
    with tempfile.TemporaryDirectory() as folder:
        if given.run is None:
            run, printed = run_quickstart(Path(folder))
        else:
            run, printed = given.run, given.output.read_text(encoding="utf-8").splitlines()
        lines = block(printed)
        README.write_text(with_block(README.read_text(encoding="utf-8"), lines), encoding="utf-8")
        print("\n".join(["README.md shows now:", "", *lines, ""]))
        if take_picture(run / "report.html", PICTURE):
            print(f"{PICTURE.relative_to(ROOT)} is the report of that run.")
        else:
            print(f"{PICTURE.relative_to(ROOT)} is as it was: there is no chromium here.")


if __name__ == "__main__":
    main()
