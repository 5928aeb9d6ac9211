"""`whet profile`: train's own loop, one step to warm up, some timed, and one more under torch's profiler."""

import contextlib
import datetime
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import rich
import torch
from rich.markdown import Markdown

from whetstone.commands.profile.page import Profile, write_page
from whetstone.commands.profile.trace import analyse, read_events
from whetstone.config import Config, LoadedConfig, make_plan
from whetstone.model.memory import usable_memory
from whetstone.run.atomic_folder import free_path
from whetstone.run.folder import run_dir, scratch_folder
from whetstone.run.setup import build, describe_model, init_distributed
from whetstone.run.timing import ThroughputMeter, device_name
from whetstone.train import loop

logger = logging.getLogger("whetstone")

TRACE, PAGE = "trace.json.gz", "profile.md"


def profile(loaded: LoadedConfig, *, num_timed: int = 2) -> Path:
    """Profile a configuration; returns the folder with trace and page."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own chatter
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(scratch_folder())
        config, notes = shorten(loaded.config, scratch, num_timed)
        short = replace(loaded, config=config, notes=(*loaded.notes, *notes))
        ranks = init_distributed(config, stack)
        run, _, _ = build(short, ranks, stack)
        run.throughput.exact = True
        recorder = Recorder(meter=run.throughput, num_timed=num_timed, trace=scratch / TRACE)
        for _ in loop(replace(run, metrics=recorder), 0, 0.0):  # type: ignore[arg-type]
            pass
        if not ranks.is_main:
            return scratch
        folder = free_path(run_dir(loaded.config) / "profile")
        folder.mkdir(parents=True)
        shutil.move(scratch / TRACE, folder / TRACE)
        device, on_gpu = run.policy.device, run.policy.device.type == "cuda"
        result = Profile(
            name=loaded.config.run.run_name or run_dir(loaded.config).name,
            date=datetime.date.today().isoformat(),
            model=describe_model(run.policy, config),
            device=device_name(device) or f"CPU, {torch.get_num_threads()} threads",
            memory_gb=usable_memory(device) / 1e9 if on_gpu else None,
            config=config,
            peak_flops=run.throughput.peak_flops,
            rows=recorder.rows[1 : 1 + num_timed],
            peaks_gb=recorder.peaks_gb[1 : 1 + num_timed],
            profiled=recorder.rows[-1],
            spent=analyse(read_events(folder / TRACE)),
        )
        page = write_page(result, folder / PAGE, trace=TRACE)
    rich.get_console().print(Markdown(page))
    logger.info(f"The page and the trace are in {folder}.")
    return folder


def shorten(config: Config, scratch: Path, num_timed: int) -> tuple[Config, list[str]]:
    """The same steps, fewer of them, in a folder that is thrown away; and what the user should know."""
    notes = []
    if config.rollout.async_rollouts:
        notes.append("async_rollouts is off here: stages are timed one after the other.")
    # Any number of problems will do: only the updates of a batch are asked for.
    batch = make_plan(_changed(config, "update", max_steps=-1), num_problems=10**6).updates_per_batch
    config = _changed(config, "update", max_steps=(2 + num_timed) * batch)
    config = _changed(config, "rollout", async_rollouts=0)
    config = _changed(config, "evaluation", eval_num_samples=0)
    quiet: dict[str, Any] = {"report_to": [], "save_strategy": "no", "log_completions_steps": 0}
    alone = {"auto_resume": False, "resume_from_checkpoint": None, "output_dir": str(scratch)}
    return _changed(config, "run", **quiet, **alone), notes


def _changed(config: Config, section: str, **values: Any) -> Config:
    return config.model_copy(update={section: dict(config)[section].model_copy(update=values)})


@dataclass
class Recorder:
    """Stands where the loop logs its rows: keeps them, and starts and stops the profiler between steps."""

    meter: ThroughputMeter
    num_timed: int
    trace: Path
    rows: list[dict[str, float]] = field(default_factory=list)
    peaks_gb: list[dict[str, float]] = field(default_factory=list)
    profiler: torch.profiler.profile | None = None

    def log(self, step: int, row: Mapping[str, float]) -> None:
        if self.profiler is not None:
            self.profiler.stop()
            self.profiler.export_chrome_trace(str(self.trace))
        self.rows.append(dict(row))
        self.peaks_gb.append(dict(self.meter.timer.peaks_gb))
        if len(self.rows) == 1 + self.num_timed:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            if self.meter.device.type == "cuda":
                kinds.append(torch.profiler.ProfilerActivity.CUDA)
            self.profiler = torch.profiler.profile(activities=kinds)
            self.profiler.start()
