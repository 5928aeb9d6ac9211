"""Makes the parts of README.md that show the quickstart: the block of its output, and docs/report.png.

    python scripts/make_readme.py                                run the quickstart (minutes), then write both
    python scripts/make_readme.py --run FOLDER --output FILE     from a run that has ended and what it printed

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

from whetstone.config import load, make_plan  # noqa: E402

README, PICTURE = ROOT / "README.md", ROOT / "docs" / "report.png"
SHOWN_STEPS = (1, 5, 10, 30)
SIZE = (1200, 1485)


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
    given = parser.parse_args()
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
