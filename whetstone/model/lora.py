"""LoRA through peft: a new adapter, or one read back from a checkpoint. Nothing else of peft is used.

An adapter has the precision of its model. peft would keep it in float32 beside a bf16 model, and its products
then take longer than those of the frozen matrices; the optimizer's float32 masters hold small updates.
"""

import copy
import functools
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from whetstone.config.sections import ModelConfig
from whetstone.errors import UserError
from whetstone.model.loading import guarded
from whetstone.model.lora_products import AdaptedProduct
from whetstone.model.nf4 import Nf4Linear
from whetstone.model.rounding import stochastic_round


def adapted(model: Any, config: ModelConfig, checkpoint: str | None, start: str | None) -> Any:
    """`model` with the adapter of a checkpoint, of the folder that the run begins from, or a new one."""
    if checkpoint is not None:
        return add_lora(model, config, checkpoint)
    if start is not None and not config.use_peft:
        return merge_lora(model, start)
    if start is not None:
        check_rank(config, start)
    return add_lora(model, config, start)


def add_lora(model: Any, config: ModelConfig, adapter: str | None) -> Any:
    """Wrap `model` with a trainable adapter; `adapter` names a folder to read one from."""
    from peft import LoraConfig

    if adapter is not None:
        adapted = _with_short_forward(read_adapter(model, adapter, is_trainable=True))
        # Where the base lies on this machine: peft reads its config.json there when it saves the adapter.
        adapted.peft_config["default"].base_model_name_or_path = model.name_or_path
        return adapted
    settings = LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        target_modules=_target_modules(config.lora_target_modules, model),
        task_type="CAUSAL_LM",
    )
    try:
        return _wrap(model, settings)
    except ValueError as error:
        raise UserError(
            f"lora_target_modules: {error} Set it to all-linear, or to names of linear layers of this model."
        ) from None


def _target_modules(names: str | list[str] | None, model: Any) -> str | list[str]:
    """Those named. all-linear leaves vision towers out, experts that are one tensor, and routers: peft would
    add their adapters to all of their weights in every pass, which is slow, and in bf16 rounds small updates
    away.
    """
    names = names or "all-linear"
    if names != "all-linear" or all(parameter.dim() < 3 for parameter in model.parameters()):
        return names
    head, text = model.get_output_embeddings(), set(model.get_decoder().modules())
    return [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and layer is not head and layer in text
    ]


def check_rank(config: ModelConfig, adapter: str) -> None:
    """Whoever goes by the configuration (a vLLM server, a resumed run) must find the adapter's own shape."""
    from peft import PeftConfig

    with guarded(adapter):
        settings: Any = PeftConfig.from_pretrained(adapter)
    keys = {"lora_r": "r", "lora_alpha": "lora_alpha", "use_rslora": "use_rslora", "use_dora": "use_dora"}
    for key, value in ((key, getattr(settings, name)) for key, name in keys.items()):
        if value != getattr(config, key):
            raise UserError(
                f"{key} is {getattr(config, key)}, but the adapter {adapter} has {value}: set {key}={value}."
            )


def merge_lora(model: Any, adapter: str) -> Any:
    """`model` with an adapter added to its weights in float32, all to be trained; no adapter is left."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    wrapped = read_adapter(model, adapter, is_trainable=False)
    layers: list[Any] = [module for module in wrapped.modules() if isinstance(module, BaseTunerLayer)]
    weights = [p for layer in layers for p in layer.get_base_layer().parameters()]
    precisions = [weight.dtype for weight in weights]
    for layer in layers:
        layer.float()
    merged = wrapped.merge_and_unload()
    for weight, dtype in zip(weights, precisions, strict=True):
        weight.data = stochastic_round(weight.data, dtype)
    return merged.requires_grad_(True)


def drop_adapters(trunk: nn.Module, *, merge: bool) -> None:
    """Put plain linear layers in the place of adapted ones; `merge`: with the adapter in their weights."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, layer in list(trunk.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            if merge:
                layer.merge()
            trunk.set_submodule(name, layer.get_base_layer())


def read_adapter(model: Any, adapter: str, *, is_trainable: bool) -> Any:
    """peft makes weights up that a file lacks, and drops those it has no place for: both are refused."""
    from peft import PeftModel, get_peft_model_state_dict
    from peft.utils.save_and_load import load_peft_weights

    with warnings.catch_warnings(), guarded(adapter):
        warnings.filterwarnings("ignore", message=".*issing adapter keys.*")
        wrapped = PeftModel.from_pretrained(
            model, adapter, is_trainable=is_trainable, autocast_adapter_dtype=not is_trainable
        )
        names = set(load_peft_weights(adapter, device="cpu"))
    differing = sorted(names ^ set(get_peft_model_state_dict(wrapped, save_embedding_layers=False)))
    if differing:
        raise UserError(
            f"The adapter {adapter} does not fit its model: {len(differing)} tensors are only in its file or "
            f"only in its settings, {differing[0]} first. Give the base model that it was trained on."
        )
    return wrapped


def wrap_lora(model: Any, adapter: Any) -> Any:
    """Wrap `model` with an adapter of the configuration of another one."""
    adapter = copy.deepcopy(adapter)
    adapter.inference_mode = False
    return _wrap(model, adapter)


def _wrap(model: Any, settings: Any) -> Any:
    from peft import get_peft_model

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
        return _with_short_forward(get_peft_model(model, settings, autocast_adapter_dtype=False))


def _with_short_forward(model: Any) -> Any:
    """`model` with a shorter forward pass in its plain LoRA layers: it compiles faster, casts nothing and
    rounds once.
    """
    for module in model.modules():
        if is_plain_lora(module):
            module.__class__ = short_linear()
    return model


def is_plain_lora(layer: Any) -> bool:
    """Whether it is a linear layer with LoRA of two matrices: no DoRA, no LoRA bias."""
    from peft.tuners.lora import Linear

    return isinstance(layer, Linear) and not layer.lora_variant and not any(layer.lora_bias.values())


def is_short(layer: Any) -> bool:
    """Whether it is a LoRA layer with the forward pass below, without dropout, on a matrix in the model's
    precision.
    """
    if type(layer) is not short_linear() or type(layer.base_layer) is not nn.Linear:
        return False
    return not any(getattr(dropout, "p", 0.0) > 0 for dropout in layer.lora_dropout.values())


@functools.cache
def short_linear() -> type:
    from peft.tuners.lora import Linear

    class LoraLinear(Linear):
        compute: Any = None  # in fewer products (model/fused_lora)

        def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
            if self.compute is not None and not self.disable_adapters and len(self.active_adapters) == 1:
                return self.compute(self, x)
            base, names = self.base_layer, [] if self.disable_adapters else self.active_adapters
            if not names:
                return base(x)
            inners = [self.lora_A[n](self.lora_dropout[n](x)) * self.scaling[n] for n in names]
            ups: list[Any] = [self.lora_B[n].weight for n in names]
            inner, up = torch.cat(inners, -1), torch.cat(ups, 1)
            return adapted_linear(base, x, inner, up)

    return LoraLinear


def adapted_linear(base: Any, x: Any, inner: Any, up: Any) -> Any:
    """base(x) + B inner, rounded once before a bias is added."""
    if type(base) is not nn.Linear and not isinstance(base, Nf4Linear):
        return base(x) + F.linear(inner, up)
    rows, inner = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (x, inner))
    if isinstance(base, Nf4Linear):
        out = base.adapted(rows, inner, up)
    else:
        out = AdaptedProduct.apply(rows, inner, base.weight, up)
    out = out.view(*x.shape[:-1], -1)
    return out if base.bias is None else out + base.bias
