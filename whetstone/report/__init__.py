"""A run folder -> report.html: one page that opens offline. Reads files only, of any run, even unfinished."""

import os
from pathlib import Path

from whetstone.files import atomic_write
from whetstone.report.page import page
from whetstone.report.read import read_run


def write_report(run_folder: str | os.PathLike[str]) -> Path:
    """Write `report.html` into the run folder and say where it is."""
    run = read_run(Path(run_folder))
    path = run.folder / "report.html"
    atomic_write(path, page(run))
    return path
