"""Data sets that are known by name: repository of the hub, revision, license, splits and their rows.

A revision is a commit, so a copy in the hub's cache is used without asking the hub. A download of the
repository in a folder of the name comes first; any other folder of the name is just a folder.
"""

import logging
from pathlib import Path
from typing import NamedTuple

from whetstone.errors import UserError
from whetstone.tasks.row_files import Row, read_file


class Known(NamedTuple):
    repository: str
    revision: str
    license: str
    file: str  # of a split; its folder is the configuration
    rows: dict[str, int]  # split -> how many; the first is trained on, the last evaluated on


_PARQUET = "{}-00000-of-00001.parquet"
KNOWN = {
    "gsm8k": Known(
        "openai/gsm8k", "740312add88f781978c0658806c59bc2815b9866", "MIT", f"main/{_PARQUET}",
        {"train": 7473, "test": 1319},
    ),
    "math": Known(
        "DigitalLearningGmbH/MATH-lighteval", "0530c78699ea5e8eb5530600900e1f328b48acad", "MIT",
        f"data/{_PARQUET}", {"train": 7500, "test": 5000},
    ),
    "math500": Known(
        "HuggingFaceH4/MATH-500", "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be", "MIT, as MATH", "{}.jsonl",
        {"test": 500},
    ),
    "mbpp": Known(
        "google-research-datasets/mbpp", "4bb6404fdc6cacfda99d4ac4205087b89d32030c", "CC-BY-4.0",
        f"full/{_PARQUET}", {"train": 374, "validation": 90, "prompt": 10, "test": 500},
    ),
    "humaneval": Known(
        "openai/openai_humaneval", "7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544", "MIT",
        f"openai_humaneval/{_PARQUET}", {"test": 164},
    ),
}  # fmt: skip
logger = logging.getLogger(__name__)


def splits_of(name: str) -> list[str]:
    """The splits of a known data set; empty for other names, and for a folder that holds something else."""
    splits = list(KNOWN[name].rows) if name in KNOWN else []
    is_other = Path(name).is_dir() and not any(_local(name, split).is_file() for split in splits)
    return [] if is_other else splits


def read_known(name: str, split: str, task: str, is_online: bool) -> list[Row]:
    """The rows of a split from the folder of the name, the hub's cache or the hub; another number is said."""
    known = KNOWN[name]
    if split not in known.rows:
        names = " or ".join(known.rows)
        raise UserError(f"{name} of task {task} has no split {split!r}: set split and eval_split to {names}.")
    path = _local(name, split)
    rows = read_file(path if path.is_file() else _fetch(name, split, is_online), task)
    if len(rows) != known.rows[split]:
        logger.warning("%s: %d rows in split %s, expected %d.", name, len(rows), split, known.rows[split])
    return rows


def _local(name: str, split: str) -> Path:
    return Path(name) / KNOWN[name].file.format(split)


def _fetch(name: str, split: str, is_online: bool) -> Path:
    from huggingface_hub import hf_hub_download

    repository, revision, known_license, file, _ = KNOWN[name]
    where: dict = {"repo_type": "dataset", "revision": revision, "local_files_only": not is_online}
    try:
        return Path(hf_hub_download(repository, file.format(split), **where))
    except Exception as error:  # the hub's client raises whatever its layers do
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise UserError(
            f"{name} ({repository}, {known_license}) is not in the hub's cache and could not be fetched "
            f"({reason if is_online else 'the hub is out of reach'}): where there is a network, run `hf "
            f"download {repository} --repo-type dataset --revision {revision} --local-dir {name}`, and put "
            f"the folder {name} into {Path.cwd()}."
        ) from None
