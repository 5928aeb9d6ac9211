"""Dropout of a model is off in training: what is trained is what sampled. An adapter keeps its own."""

from torch import nn


def disable_dropout(model: nn.Module) -> None:
    """No dropout and no noise of routers, except in adapters."""
    for name, module in model.named_modules():
        if "lora_" in name:
            continue
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for key, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in key or "jitter" in key):
                setattr(module, key, 0.0)
