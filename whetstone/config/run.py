"""The section of a run: its name and folder, what is logged, and when it is saved."""

from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from whetstone.config.base import MAX_COUNT, MAX_STEPS, Name, Resume, Section, Seed, Steps, accept
from whetstone.config.yaml_text import shorten

SINKS = ("wandb", "tensorboard", "trackio")
_MAX_NAME_BYTES = 255  # of one name in a file system


class RunConfig(Section):
    """Where things go, how often, and how a run is found again."""

    resume: ClassVar = Resume.SAFE
    output_dir: Name = "outputs"
    """Parent of the run folder; the folder itself where run_name is empty."""
    run_name: Name | None = None
    """Name of the run and of its folder inside output_dir; default: the file's, unless output_dir is set."""
    seed: Annotated[Seed, Resume.NOTED] = 42
    """Seed of the sampling and of everything else that is random in a run."""
    report_to: list[Name] = Field(default_factory=list)
    """Beside metrics.jsonl and the terminal: wandb, tensorboard, trackio; none switches all of these off."""
    wandb_project: Name = "whetstone"
    """Project name for wandb and trackio."""
    wandb_name: Name | None = None
    """Name of the run in wandb and trackio; default: run_name. It does not change the folder."""
    wandb_entity: Name | None = None
    """Team or user of wandb that the run belongs to; default: wandb's own."""
    wandb_tags: list[Name] = Field(default_factory=list)
    """Tags of the run in wandb, as a list or a text with commas."""
    logging_steps: int = Field(default=1, ge=1, le=MAX_STEPS)
    """Steps between lines in the terminal and in report_to; metrics.jsonl has every step."""
    preflight: Annotated[Literal["stop", "warn", "off"], accept({True: "stop", False: "off"})] = "stop"
    """Sample some training prompts before step 1, and stop where nothing can be learned (docs/check.md)."""
    watch: bool | Literal["auto"] = "auto"
    """Serve the page of `whet watch` beside the run; auto: where the output is a terminal."""
    log_completions_steps: int = Field(default=10, ge=0, le=MAX_STEPS)
    """Write all completions of every so-many-th step into completions/; 0: never."""
    log_tokens_groups: int = Field(default=4, ge=0, le=MAX_COUNT)
    """Groups of each step whose tokens are written with logprobs, weights and masks; 0: none."""
    log_tokens_mb: float = Field(default=200.0, gt=0, le=1e6)
    """Disk for these tokens; beyond it some steps in between are removed."""
    save_strategy: Annotated[Literal["steps", "epoch", "no"], accept({False: "no"})] = "steps"
    """When checkpoints are written."""
    save_steps: Steps = Field(default=500, gt=0)
    """Steps between checkpoints; below 1: a fraction of all steps."""
    save_total_limit: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Keep only so many newest checkpoints."""
    load_best_model_at_end: bool = False
    """Make the model with the best fixed evaluation the final one, instead of the last."""
    auto_resume: bool = False
    """Go on from the newest whole checkpoint in the run folder, if there is one."""
    resume_from_checkpoint: Name | bool | None = None
    """Go on from this checkpoint (a folder, or true for the newest)."""
    overwrite_output_dir: bool = False
    """Begin anew in a folder that holds another run, which is moved aside."""

    push_to_hub: bool = False
    """Upload final_model to the hub at the end of the run; a failure costs nothing (docs/export.md)."""
    hub_model_id: Name | None = None
    """Name on the hub, with or without its owner; default: run_name."""
    hub_private_repo: Annotated[bool, accept({None: True})] = True
    """Create the repository as a private one."""

    @field_validator("run_name", mode="before")
    @classmethod
    def _stays_in_output_dir(cls, name: Any) -> Any:
        if isinstance(name, int | float) and not isinstance(name, bool):
            name = str(name)
        if not isinstance(name, str) or name == "":
            return name
        if not name.isprintable() or not name.strip():
            raise ValueError("write a name of printable characters: it becomes a folder inside output_dir")
        folders = name.split("/")
        if PurePosixPath(name).is_absolute() or {"", ".", ".."} & set(folders) or "\\" in name:
            raise ValueError(f"{shorten(name)!r} would leave output_dir: write a plain name")
        if any(len(folder.encode(errors="replace")) > _MAX_NAME_BYTES for folder in folders):
            raise ValueError(f"the name of {len(name):,} characters is too long for a folder: shorten it")
        return name

    @field_validator("output_dir")
    @classmethod
    def _is_printable(cls, name: str) -> str:
        if not name.isprintable():
            raise ValueError("write a path of printable characters")
        return name

    @field_validator("report_to", mode="before")
    @classmethod
    def _known_sinks(cls, value: Any) -> Any:
        if not isinstance(value, str | list | tuple | None):
            raise ValueError(f"write a name or a list of {', '.join(SINKS)}, or none")
        entries = [] if value is None else [value] if isinstance(value, str) else value
        names = [name.strip().lower() for entry in entries for name in str(entry).split(",") if name.strip()]
        names = list(SINKS) if names == ["all"] else [n for n in names if n not in ("none", "console")]
        if unknown := next((name for name in names if name not in SINKS), None):
            raise ValueError(f"'{shorten(unknown)}' is not known: choose from {', '.join(SINKS)} or none")
        return list(dict.fromkeys(names))

    @field_validator("wandb_tags", mode="before")
    @classmethod
    def _as_texts(cls, value: Any) -> Any:
        entries = value.split(",") if isinstance(value, str) else [] if value is None else value
        return [s for e in entries if (s := str(e).strip())] if isinstance(entries, list) else entries
