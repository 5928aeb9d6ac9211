"""Where `whet eval` writes, and what it calls the model that it measured.

The results lie beside the checkpoint: RUN/evaluations/NAME for RUN/NAME. Where that may not be written, or
for weights that belong to no run, they lie in the configured run folder. Evaluates nothing.
"""

import json
import os
import re
import tempfile
from pathlib import Path

from whetstone.config import Config
from whetstone.errors import UserError


def evaluation_folder(config: Config) -> Path:
    """The folder of an evaluation, made and found to be writable."""
    weights = config.evaluation.checkpoint_path
    own = Path(config.run.output_dir) / (config.run.run_name or "")
    name = "model" if weights is None else Path(os.path.abspath(weights)).name
    candidates = [own / "evaluations" / name]
    if weights is not None and (Path(weights).parent / "config.yaml").is_file():
        candidates.insert(0, Path(weights).parent / "evaluations" / name)
    reason = None
    for candidate in candidates:
        reason = _why_not(candidate)
        if reason is None:
            return candidate
    raise UserError(f"{candidates[-1]} may not be written ({reason}): set output_dir to another folder.")


def title_of(config: Config) -> str:
    """`Evaluation of outputs/quickstart/final_model (step 30)`"""
    weights = config.evaluation.checkpoint_path
    if weights is None:
        return f"Evaluation of {config.model.model_name_or_path}"
    step = step_of(Path(weights))
    return f"Evaluation of {weights}" + ("" if step is None else f" (step {step})")


def step_of(weights: Path) -> int | None:
    """The optimizer step that a checkpoint-N or final_model folder was saved at; None where nobody knows."""
    named = re.fullmatch(r"checkpoint-(\d+)", weights.name)
    if named:
        return int(named[1])
    try:
        results = json.loads((weights.parent / "train_results.json").read_text(encoding="utf-8"))
        steps = results["steps"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return steps if weights.name == "final_model" and isinstance(steps, int) else None


def _why_not(folder: Path) -> str | None:
    """Why nothing can be written there; None if it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror
