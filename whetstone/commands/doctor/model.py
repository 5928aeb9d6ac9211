"""Whether the model of a run is on this machine or can be fetched. Nothing is downloaded."""

import os
from pathlib import Path

from whetstone.commands.doctor.check import Check, make_check
from whetstone.commands.doctor.machine import hub_cache
from whetstone.config import Config
from whetstone.errors import UserError, first_line
from whetstone.model.hub import HUB_TIMEOUT_S, PEBBLE, SMOLLM2, SMOLLM2_HUB, cache_folder, resolve

SECTION = "Model"


def check_model(config: Config | None) -> list[Check]:
    if config is None:
        return []
    name = config.evaluation.checkpoint_path if config.evaluation.eval_only else None
    return [_model(name or config.model.model_name_or_path)]


def _model(name: str) -> Check:
    if name == SMOLLM2:
        if (cache_folder() / SMOLLM2).is_dir():
            return make_check(SECTION, "model", f"{name} in {cache_folder()}")
        return _hub_model(SMOLLM2_HUB, only_source=False)  # the package registry has it, too
    try:
        folder = resolve(name)
    except UserError as error:
        remedy = f"set model_name_or_path to a model folder, a hub name or {PEBBLE}"
        return make_check(SECTION, "model", str(error), remedy, problem=True)
    if Path(folder).is_dir():
        return make_check(SECTION, "model", f"{name} in {folder}")
    return _hub_model(folder)


def _hub_model(name: str, *, only_source: bool = True) -> Check:
    """In the cache of the hub, or on the hub."""
    cached = hub_cache() / f"models--{name.replace('/', '--')}" / "snapshots"
    if any(cached.glob("*/*config.json")) and any(cached.glob("*/*.safetensors")):  # or an adapter's
        return make_check(SECTION, "model", f"{name} in {hub_cache()}")
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        detail = f"{name} is not in {hub_cache()}, and HF_HUB_OFFLINE is set"
        return make_check(SECTION, "model", detail, "unset HF_HUB_OFFLINE", problem=only_source)
    failure = ask_hub(name)
    if failure is None:
        return make_check(SECTION, "model", f"{name} is on the hub and will be fetched")
    detail = f"{name} is not in {hub_cache()}, and the hub does not give it ({failure})"
    remedy = "set model_name_or_path to a folder"
    if "gated" in failure.lower() or "401" in failure:
        remedy = "accept its license on its page, and run `hf auth login`"
    return make_check(SECTION, "model", detail, remedy, problem=only_source)


def ask_hub(name: str) -> str | None:
    """Why the hub does not give a model; None: it does."""
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # no network, a proxy, no such model, no access
        return f"{type(error).__name__}: {first_line(error)[:200]}"
    return None
