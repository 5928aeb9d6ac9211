"""What a user's argument stands for: the model of a run, a checkpoint, a model folder, or a name."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whetstone.config import Config, build, load
from whetstone.config.sections import ModelConfig
from whetstone.errors import UserError
from whetstone.model.hub import PEBBLE, SMOLLM2, base_and_adapter
from whetstone.model.loading import guarded, verify_folder
from whetstone.model.policy import Policy, choose_device, load_policy
from whetstone.run.checkpoint import complete_checkpoints

RUNS = Path("outputs")  # the default output_dir
MODEL_FILES = ("config.json", "adapter_config.json")


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model and the configuration that it is used with."""

    name: str  # as the user wrote it
    config: Config  # of its run; of a model without a run the defaults
    weights: Path | None  # a checkpoint; None: the model that the configuration names
    run: Path | None  # the folder of its run

    @property
    def shown_name(self) -> str:
        """The folder of the weights, or the name of the model."""
        return self.name if self.weights is None else str(self.weights)

    @property
    def can_compare(self) -> bool:
        """Whether there is a model before training to compare with."""
        return self.run is not None and self.weights is not None


def find_source(name: str | Path) -> Source:
    """The model that `name` means. Of a run: final_model, or else the newest whole checkpoint."""
    folder = Path(name).expanduser()
    has_model = any((folder / file).is_file() for file in MODEL_FILES)
    if has_model and (folder.parent / "config.yaml").is_file():
        run = folder.parent
        return Source(name=str(name), config=_read_config(run), weights=folder, run=run)
    if not has_model and (folder / "config.yaml").is_file():
        return Source(name=str(name), config=_read_config(folder), weights=_newest(folder), run=folder)
    if not has_model and str(name) not in (PEBBLE, SMOLLM2):
        _suggest_run(folder)
    return Source(name=str(name), config=build({"model_name_or_path": str(name)}), weights=None, run=None)


def _suggest_run(folder: Path) -> None:
    """A folder of runs, or the name of a run without its folder, is no model: name the run."""
    if folder.is_dir():
        runs = sorted(path.parent for path in folder.glob("*/config.yaml"))
        if runs:
            raise UserError(f"{folder} is a folder of runs: give one of them, such as {runs[0]}.")
    elif len(folder.parts) == 1 and (RUNS / folder / "config.yaml").is_file():
        raise UserError(f"There is no model '{folder}' here: did you mean {RUNS / folder}?")


def before_training(source: Source) -> Source:
    """The model that the run of `source` started from."""
    if not source.can_compare:
        raise UserError(
            f"{source.name} belongs to no run, so there is no model before training: give the folder of a "
            "run, such as outputs/quickstart."
        )
    base = source.config.model.model_name_or_path
    return Source(name=base, config=source.config, weights=None, run=source.run)


def load_source(source: Source, device: str = "auto") -> Policy:
    """The policy of a source. On a CPU an adapter is merged: it decodes faster, in the same float32."""
    is_adapter = source.weights is not None and (source.weights / "adapter_config.json").is_file()
    changes: dict[str, Any] = {"device": device, "use_peft": is_adapter, "gradient_checkpointing": False}
    config = source.config.model.model_copy(update=changes)
    if source.weights is not None:
        verify_folder(source.weights)
    if source.run is None:
        config = config.model_copy(update={"bf16": _is_half(config, device)})
    policy = load_policy(config, source.weights)
    if policy.is_lora and policy.device.type == "cpu" and not config.load_in_4bit:
        policy = Policy(policy.model.merge_and_unload(), policy.tokenizer, policy.device)
        policy.verify()
    return policy


def _read_config(run: Path) -> Config:
    return load(run / "config.yaml").config


def _newest(run: Path) -> Path:
    if any((run / "final_model" / file).is_file() for file in MODEL_FILES):
        return run / "final_model"
    checkpoints = complete_checkpoints(run)
    if not checkpoints:
        raise UserError(
            f"The run {run} has no final_model and no checkpoint yet: wait until it is finished, or set "
            "save_steps so that it writes checkpoints."
        )
    return checkpoints[0].folder


def _is_half(config: ModelConfig, device: str) -> bool:
    """Whether a GPU runs it in bfloat16: if its weights are stored in 16 bits."""
    import torch
    from transformers import AutoConfig

    if choose_device(device).type == "cpu":
        return False
    base, _ = base_and_adapter(config.model_name_or_path)
    with guarded(base):
        stored = AutoConfig.from_pretrained(base, trust_remote_code=False).dtype
    return stored in (torch.bfloat16, torch.float16)
