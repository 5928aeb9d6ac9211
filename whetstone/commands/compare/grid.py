"""The grid of `whet compare`: one `whet train` process for each variant and seed.

Parses the grid and runs the cells that are not finished. results.py computes the table, plot.py draws it.

    FOLDER/grid.json              what is compared
    FOLDER/runs/CELL/             a run folder each
    FOLDER/logs/CELL.log          what that run wrote to the terminal
    FOLDER/table.md results.json compare.png
"""

import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

import rich

from whetstone.commands.compare.plot import draw
from whetstone.commands.compare.progress import Progress
from whetstone.commands.compare.results import markdown_table, show_table
from whetstone.config import flatten, load
from whetstone.errors import UserError
from whetstone.files import atomic_write, json_safe
from whetstone.run.comparison import (
    GRID,
    Cell,
    cell_results,
    make_results,
    read_cells,
    run_path,
    versus_first,
)
from whetstone.run.folder import RESUME_SAFE_KEYS
from whetstone.run.record import read_mapping
from whetstone.run.signals import StopRequest

# `RESUME_SAFE_KEYS` do not change what a run computes, but these change where it ends or what is measured.
RESULT_KEYS = frozenset({"max_steps", "num_train_epochs", "fixed_eval_steps"})
MANAGED_KEYS = ("output_dir", "run_name", "auto_resume", "overwrite_output_dir", "resume_from_checkpoint")


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What is to be compared: every cell, and where it all goes."""

    source: str
    folder: Path
    cells: list[Cell]

    def run_path(self, cell: Cell) -> Path:
        return run_path(self.folder, cell)

    def log_path(self, cell: Cell) -> Path:
        return self.folder / "logs" / f"{cell.name}.log"


@dataclass
class RunningCell:
    cell: Cell
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    started_at: float = field(default_factory=time.monotonic)


def split_top(text: str, separator: str) -> list[str]:
    """Split at `separator` where it stands outside of brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[{(":
            depth += 1
        elif letter in "]})":
            depth -= 1
        elif letter == separator and depth == 0:
            parts.append("")
            continue
        parts[-1] += letter
    return [part.strip() for part in parts]


def parse_grid(source: str, arguments: Sequence[str]) -> Grid:
    """CONFIG and `key=value` arguments -> cells; every cell's configuration is checked before any runs."""
    axes: dict[str, list[tuple[str, list[str]]]] = {}  # key -> (its name in the variant, its settings)
    common: list[str] = []
    name = "compare"
    for argument in arguments:
        key, equals, text = argument.removeprefix("--").partition("=")
        if not equals:
            raise UserError(f"'{argument}' is not understood: write key=value or key=one,another.")
        if key == "variant":
            axes[key] = [_variant(entry) for entry in split_top(text, ";") if entry]
            continue
        values = split_top(text, ",")
        if key in MANAGED_KEYS and len(values) > 1:
            raise UserError(f"{key} can't differ between the runs of a comparison: give one value.")
        if key == "run_name":
            name = load(None, [f"run_name={text}"]).config.run.run_name or name
        elif len(values) == 1:
            common.append(f"{key}={text}")
        elif "" in values:
            raise UserError(f"{argument} has an empty value: write {key}=one,another without a last comma.")
        else:
            axes[key] = [(f"{key}={value}", [f"{key}={value}"]) for value in values]
    folder = Path(load(source, common).config.run.output_dir) / name
    return Grid(source=source, folder=folder, cells=_cells(source, folder, common, axes))


def _variant(entry: str) -> tuple[str, list[str]]:
    """`gspo: loss_type=gspo epsilon=3e-4` -> its name and its settings; the name may be left out."""
    match = re.match(r"([^=:]+):\s", entry)
    settings = entry[match.end() :] if match else entry
    try:
        overrides = shlex.split(settings)
    except ValueError:
        raise UserError(f"The variant '{entry}' has an open quote: close it.") from None
    if not overrides or any("=" not in override for override in overrides):
        usage = 'variant="NAME: key=value key=value; NAME: ..."'
        raise UserError(f"The variant '{entry}' is not understood: write {usage}.")
    return (match.group(1).strip() if match else " ".join(overrides)), overrides


def _cells(
    source: str, folder: Path, common: list[str], axes: dict[str, list[tuple[str, list[str]]]]
) -> list[Cell]:
    seeds = axes.pop("seed", [("", [])])
    if not axes and len(seeds) == 1:
        raise UserError("There is nothing to compare: give a key several values, such as seed=1,2,3.")
    cells = []
    for choice in itertools.product(*axes.values()):
        variant = " ".join(label for label, _ in choice) or Path(source).stem
        chosen = [setting for _, settings in choice for setting in settings]
        for label, seed_settings in seeds:
            name = re.sub(r"[^\w.=+-]+", "_", f"{variant} {label}".strip())
            settings = [*common, *chosen, *seed_settings]
            config = load(source, settings).config
            if config.evaluation.eval_num_samples == 0 or config.evaluation.eval_only:
                raise UserError("A comparison needs eval_num_samples above 0 and eval_only=false.")
            cells.append(Cell(name=name, variant=variant, seed=config.run.seed, settings=settings))
    names = [cell.name for cell in cells]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"The comparison holds {twice} twice: give every value or variant name once.")
    return cells


def compare(source: str, settings: Sequence[str], *, jobs: int = 1) -> dict:
    """Run the grid, write and print the table; returns the results."""
    grid = parse_grid(source, settings)
    document = {"source": grid.source, "cells": [asdict(cell) for cell in grid.cells]}
    atomic_write(grid.folder / GRID, json.dumps(document, indent=1))
    failed, stopped = run_cells(grid, jobs)
    results = write_table(grid, failed)
    if stopped:
        rich.get_console().print("Stopped. The same command continues from here.", highlight=False)
        raise KeyboardInterrupt
    if failed:
        raise UserError(
            f"{len(failed)} of {len(grid.cells)} runs failed ({', '.join(failed)}): their logs are in "
            f"{grid.folder / 'logs'}; the same command runs only what is missing."
        )
    return results


def read_grid(folder: Path) -> Grid:
    """The grid that an earlier comparison wrote."""
    comparison = read_cells(folder)
    if comparison is None:
        raise UserError(f"{folder} holds no comparison: give the folder that `whet compare` wrote.")
    source, cells = comparison
    return Grid(source=source, folder=folder, cells=cells)


def run_cells(grid: Grid, jobs: int) -> tuple[dict[str, str], bool]:
    """Run what is not done, `jobs` at once; returns failed cells with the end of their log."""
    progress = Progress(grid.source, grid.cells, grid.folder / "runs", jobs)
    ended = [cell for cell in grid.cells if (grid.run_path(cell) / "train_results.json").is_file()]
    done = [cell for cell in ended if _is_same(grid, cell)]
    waiting = [cell for cell in grid.cells if cell not in done]
    progress.begin(len(waiting))
    for cell in done:
        progress.finished(cell, None)
    failed: dict[str, str] = {}
    running: list[RunningCell] = []
    with StopRequest() as stop:
        is_signaled = False
        try:
            while running or (waiting and not stop.requested):
                while waiting and len(running) < jobs and not stop.requested:
                    running.append(_start(grid, waiting.pop(0), jobs))
                if stop.requested and not is_signaled:
                    is_signaled = True  # each saves its step and ends; a later command resumes there
                    for entry in running:
                        entry.process.send_signal(signal.SIGINT)
                time.sleep(0.05)
                progress.look([(entry.cell, entry.started_at) for entry in running])
                for entry in [entry for entry in running if entry.process.poll() is not None]:
                    running.remove(entry)
                    entry.log.close()
                    if entry.process.returncode == 0:
                        progress.finished(entry.cell, time.monotonic() - entry.started_at)
                    elif not stop.requested:
                        text = grid.log_path(entry.cell).read_text(encoding="utf-8", errors="replace")
                        lines = [line.strip() for line in text.splitlines() if line.strip()]
                        failed[entry.cell.name] = lines[-1] if lines else "it wrote nothing"
                        progress.failed(entry.cell, failed[entry.cell.name])
        finally:
            progress.end()
            for entry in running:  # only after a second Ctrl-C or an error of ours
                entry.process.kill()
                entry.process.wait()
                entry.log.close()
    return failed, stop.requested


def _is_same(grid: Grid, cell: Cell) -> bool:
    """Whether the cell's run has the configuration that is asked for now."""
    before = read_mapping(grid.run_path(cell) / "config.yaml") or {}
    now = flatten(load(grid.source, cell.settings).config)
    decisive = [key for key in now if key not in RESUME_SAFE_KEYS - RESULT_KEYS]
    return all(key in before and before[key] == now[key] for key in decisive)


def _start(grid: Grid, cell: Cell, jobs: int) -> RunningCell:
    # A run of the same configuration is resumed; one of another configuration is moved aside.
    resume = "auto_resume=true" if _is_same(grid, cell) else "auto_resume=false"
    # Quoted, since values are read as YAML: a cell may be called 1 or true.
    folders = [f"output_dir={json.dumps(str(grid.folder / 'runs'))}", f"run_name={json.dumps(cell.name)}"]
    path = grid.log_path(cell)
    path.parent.mkdir(parents=True, exist_ok=True)
    log = path.open("ab")
    environment = dict(os.environ)
    if jobs > 1:  # runs that each take every core only wait for one another
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    command = [sys.executable, "-m", "whetstone", "train", grid.source, *cell.settings, *folders, resume]
    process = subprocess.Popen(
        [*command, "overwrite_output_dir=true"],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,  # Ctrl-C reaches them through us, once
    )
    return RunningCell(cell=cell, process=process, log=log)


def write_table(grid: Grid, failed: dict[str, str]) -> dict:
    """table.md, results.json and compare.png from the runs that have ended; printed too."""
    folders = {cell.name: grid.run_path(cell) for cell in grid.cells}
    ended = {name: cell_results(folder) for name, folder in folders.items()}
    results = make_results(grid.source, grid.cells, ended, failed)
    if not results["variants"]:
        if failed:
            return results
        raise UserError(f"No run of {grid.folder} has ended yet: there is no table to make.")
    for variant, versus in zip(results["variants"], versus_first(results["variants"], folders), strict=True):
        variant["versus"] = versus
    atomic_write(grid.folder / "results.json", json.dumps(json_safe(results), indent=1))
    atomic_write(grid.folder / "table.md", markdown_table(results))
    draw(results, folders, grid.folder / "compare.png")
    show_table(results)
    rich.get_console().print(f"table.md, results.json and compare.png are in {grid.folder}.", highlight=False)
    return results
