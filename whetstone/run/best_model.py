"""`load_best_model_at_end`: the model of the best evaluation so far, kept in RUN/best_model until the end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from whetstone.evaluation.evaluator import EvalResult, read_summary
from whetstone.model.manifest import Damage, read_manifest
from whetstone.model.policy import Policy
from whetstone.model.sharded import model_writer
from whetstone.parallel.collectives import all_gather_objects
from whetstone.run.atomic_folder import publish
from whetstone.run.checkpoint import save_model
from whetstone.terminal.stages import stage


class BestModel:
    """Evaluations are shown to it; `publish` makes the best one's model the final one."""

    def __init__(self, run: Path, policy: Policy, *, enabled: bool) -> None:
        self._run, self._policy, self._enabled = run, policy, enabled
        self._folder = run / "best_model"
        self.step, self._score = _previous(self._folder) if enabled else (None, 0.0)
        if enabled and self.step is None:  # a finished run with more steps
            self._folder = run / "final_model"
            self.step, self._score = _previous(self._folder)

    def observe(self, step: int, result: EvalResult) -> None:
        """Keep the model of `step` if it is the best; a collective call. The untrained one is not kept."""
        if not self._enabled or step == 0:
            return
        score, ranks = _score(result.summary()), self._policy.ranks
        is_best = ranks.is_main and (self.step is None or score > self._score)
        if not any(all_gather_objects(ranks, is_best)):
            return
        with stage("saving the best model"):
            write_model = model_writer(self._policy)
            self._folder = self._run / "best_model"
            if ranks.is_main:
                save_model(write_model, self._folder, step)
        self.step, self._score = step, score

    def publish(self, write_model: Callable[[Path], None], folder: Path, last_step: int) -> int:
        """Make the best model, or the last one, the folder `folder`; returns its step."""
        if self.step is None:
            save_model(write_model, folder, last_step)
            return last_step
        if self._folder != folder:
            publish(self._folder, folder)
        return self.step


def _previous(folder: Path) -> tuple[int | None, float]:
    """Step and score of what a resumed run had kept."""
    try:
        step = read_manifest(folder).step
    except Damage:
        return None, 0.0
    summary = read_summary(folder.parent / "eval_results" / f"eval_step_{step}.json")
    return (None, 0.0) if summary is None else (step, _score(summary))


def _score(summary: dict[str, Any]) -> float:
    """Accuracy, or the reward where no answers are known."""
    return float(summary["accuracy" if summary.get("is_judged", True) else "reward"]["mean"])
