"""The policy of a source, to sample from."""

from typing import Any

from whetstone.config.sections import ModelConfig
from whetstone.errors import UserError
from whetstone.model.hub import base_and_adapter
from whetstone.model.loading import guarded, verify_folder
from whetstone.model.policy import Policy, choose_device, load_policy
from whetstone.run.source import Source


def before_training(source: Source) -> Source:
    """The model that the run of `source` started from."""
    if not source.can_compare:
        raise UserError(
            f"{source.name} belongs to no run, so there is no model before training: give the folder of a "
            "run, such as outputs/quickstart."
        )
    return Source(name=source.config.model.model_name_or_path, run=source.run)


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
