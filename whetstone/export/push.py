"""Push a model folder to the hub by huggingface_hub: weights, tokenizer and card; private unless told.

Only the files of a model are uploaded: no optimizer state, no pickles, no logs of the run.
"""

import logging
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whetstone.config import Config
from whetstone.errors import UserError, message_of
from whetstone.model.card import ADAPTER_CONFIG, base_of, is_hub_name
from whetstone.model.loading import verify_folder
from whetstone.model.manifest import NAME as MANIFEST
from whetstone.run.source import Source, find_source

ENDINGS = (".safetensors", ".json", ".jinja", ".txt", ".model", ".md", ".gguf")
NOT_PUSHED = (MANIFEST, "trainer_state.json")
LOGIN = "run `hf auth login`, or set HF_TOKEN to a token that may write"

logger = logging.getLogger("whetstone")


@dataclass(frozen=True, kw_only=True)
class Upload:
    """What would be pushed where."""

    folder: Path
    name: str  # `owner/name`, or `name` for one of your own
    private: bool
    files: dict[str, int]  # name -> bytes


def plan_upload(source: Source, name: str, *, private: bool) -> Upload:
    """The files of a verified model folder, and a name that the hub takes."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        raise UserError(f"'{name[:100]}' is no name for the hub: write OWNER/NAME or NAME.") from None
    folder = Path(source.model).expanduser()
    if not folder.is_dir():
        raise UserError(f"There is no folder {source.model}: give a run, a checkpoint or a model folder.")
    verify_folder(folder)
    files = {
        path.name: path.stat().st_size
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name.endswith(ENDINGS) and path.name not in NOT_PUSHED
    }
    if not any(file.endswith((".safetensors", ".gguf")) for file in files):
        raise UserError(f"{folder} has no weights (*.safetensors, *.gguf): give a run or a model folder.")
    return Upload(folder=folder, name=name, private=private, files=files)


def push(upload: Upload, *, update: bool = False) -> str:
    """Create the repository and upload all files; returns its address.

    `update`: the repository may exist. One that is public is left alone unless that was asked for.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    if get_token() is None:
        raise UserError(f"No token of the hub is known: {LOGIN}.")
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    disable_progress_bars()  # the command's own line says what it is doing
    try:
        url = api.create_repo(upload.name, private=upload.private, exist_ok=update)
        if update and upload.private and not api.model_info(url.repo_id).private:
            raise UserError(
                f"{url.repo_id} is public: push there with --public (hub_private_repo: false), or choose "
                "another name."
            )
        api.upload_folder(
            repo_id=url.repo_id,
            folder_path=upload.folder,
            allow_patterns=list(upload.files),
            commit_message=f"Upload {upload.folder.name} with whetstone",
        )
    except UserError:
        raise
    except Exception as error:
        raise UserError(_sentence(error, upload)) from None
    finally:
        enable_progress_bars()
    return str(url)


def push_final(config: Config, folder: Path) -> None:
    """Push the final model of a run whose configuration says so. A failure is logged: nothing is lost."""
    settings = config.run
    if not settings.push_to_hub:
        return
    name = settings.hub_model_id or settings.run_name or folder.resolve().name
    name = name.replace("/", "-") if settings.hub_model_id is None else name
    try:
        upload = plan_upload(find_source(str(folder)), name, private=settings.hub_private_repo)
        logger.info(f"The model is on the hub: {push(upload, update=True)}")
    except Exception as error:  # a bug of the hub's package must not cost a run its exit code, either
        reason = str(error) if isinstance(error, UserError) else f"The push failed ({message_of(error)})."
        again = shlex.join(["whet", "push", str(folder), name])
        logger.warning(f"{reason} The model was not pushed; it is in {folder / 'final_model'}: `{again}`.")


def notes(upload: Upload) -> list[str]:
    """What others will lack: an adapter whose base only this machine has."""
    if not (upload.folder / ADAPTER_CONFIG).is_file():
        return []
    base = base_of(upload.folder, {})
    if is_hub_name(base):
        return []
    return [
        f"This is an adapter of {Path(base).name}, which is not on the hub: `whet export` writes a model of "
        "its own that you can push instead."
    ]


def _sentence(error: Exception, upload: Upload) -> str:
    """What went wrong and what to do, whatever the hub's package raised."""
    cause: Any = error
    while cause is not None and getattr(cause, "response", None) is None:
        cause = cause.__cause__
    status = None if cause is None else cause.response.status_code
    if status == 401:
        return f"The hub does not accept the token: {LOGIN}."
    if status == 403:
        return f"The token may not write to {upload.name}: choose a name of your own, or {LOGIN}."
    if status == 409:
        return (
            f"There is a model {upload.name} on the hub already: choose another name, or add --update to "
            "write over its files."
        )
    if status is not None:
        first = (str(cause).strip().splitlines() or [""])[0][:200].rstrip(".")
        return f"The hub refused the upload (status {status}; {first}): try again later."
    first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200].rstrip(".:")
    return f"The hub can't be reached ({first}): check the network and HF_ENDPOINT, then push again."
