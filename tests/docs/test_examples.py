"""Dockerfile and examples for clusters: they can't be run here, but parse and load."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from whetstone.__main__ import import_command
from whetstone.commands.parser import CommandParser
from whetstone.config import load

ROOT = Path(__file__).resolve().parents[2]
FILES = [
    ROOT / "Dockerfile",
    *(path for name in ("slurm", "skypilot", "kubernetes") for path in (ROOT / "examples" / name).iterdir()),
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_pages_named_by_an_example_exist(path: Path) -> None:
    pages = re.findall(r"(?:docs|tests)/[\w/]+\.\w+", path.read_text(encoding="utf-8"))
    assert [page for page in pages if not (ROOT / page).is_file()] == []


def test_the_image_copies_what_exists() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    names = [name for line in re.findall(r"^COPY (.*) \S+$", text, flags=re.M) for name in line.split()]
    assert "whetstone" in names and all((ROOT / name).exists() for name in names)


def test_the_script_for_slurm_parses() -> None:
    script = ROOT / "examples" / "slurm" / "train.sbatch"
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    assert load("grpo", ["auto_resume=true", "ddp_size=4"]).config.run.auto_resume


def test_the_tasks_for_clusters_load_their_settings() -> None:
    sky = yaml.safe_load((ROOT / "examples/skypilot/train.yaml").read_text(encoding="utf-8"))
    words = shlex.split(sky["run"].partition("whetstone train ")[2])
    values = {f"${key}": value for key, value in sky["envs"].items()}
    config, *settings = [values.get(word, word) for word in words if values.get(word, word)]
    assert load(config, settings).config.run.output_dir == "/outputs"

    job = yaml.safe_load((ROOT / "examples/kubernetes/rayjob.yaml").read_text(encoding="utf-8"))
    _, verb, *arguments = shlex.split(job["spec"]["entrypoint"])
    args = CommandParser(verb, import_command(verb)).parse(arguments)
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert args.ranks + args.servers == group["replicas"] * int(
        container["resources"]["limits"]["nvidia.com/gpu"]
    )
    config, *settings = arguments[arguments.index("train") + 1 :]
    assert load(config, settings).config.engines.weight_transfer_dir == "/outputs/weights"
