"""LoRA layers: the precision of the adapter, and our forward pass beside peft's own."""

import copy

import pytest
import torch
from peft.tuners.lora import Linear

from tests.conftest import make_policy
from tests.support.engines import compare_with_trainer
from tests.support.models import tiny_policy
from tests.support.update import (
    PARTS_OF_A_LAYER,
    flat_gradient,
    make_samples,
    reference_gradient,
    share_kept,
    shares_kept,
    train_on,
    updater_for,
    with_lora,
    with_small_adapter,
)
from whetstone.config import build, make_plan
from whetstone.config.sections import ModelConfig
from whetstone.engines.native import NativeEngine
from whetstone.errors import UserError
from whetstone.model.fused_lora import fuse_lora, wide_lora
from whetstone.model.loading import load_pretrained
from whetstone.model.lora import add_lora, check_rank, is_short, merge_lora
from whetstone.model.nf4 import dequantize_model, quantize_model
from whetstone.model.policy import Policy, load_policy
from whetstone.update.packing import pack
from whetstone.update.updater import Updater


def lora_layers(dtype: torch.dtype, **settings) -> list[Linear]:
    torch.manual_seed(0)
    lm = make_policy().lm.to(dtype)
    model = add_lora(lm, ModelConfig(use_peft=True, lora_r=4, lora_alpha=12, **settings), None)
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    for layer in layers:
        with torch.no_grad():
            for parameter in layer.lora_B.parameters():
                parameter.normal_(std=0.1)
    return layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_adapter_has_the_precision_of_the_model(dtype: torch.dtype) -> None:
    layers = lora_layers(dtype)
    assert layers and all(p.dtype == dtype for layer in layers for p in layer.parameters())


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_forward_pass_is_pefts(dropout: float) -> None:
    for layer in lora_layers(torch.float32, lora_dropout=dropout):
        assert type(layer) is not Linear and is_short(layer) == (dropout == 0)
        layer.eval()
        x = torch.randn(3, int(layer.in_features or 0))
        own = Linear.forward(layer, x)
        torch.testing.assert_close(layer(x), own, rtol=1e-5, atol=1e-6)
        assert not torch.equal(own, layer.base_layer(x))
        layer.enable_adapters(False)
        assert torch.equal(layer(x), layer.base_layer(x))


def test_dropout_changes_the_adapters_input_only() -> None:
    (layer, *_) = lora_layers(torch.float32, lora_dropout=0.5)
    x = torch.randn(3, int(layer.in_features or 0))
    torch.manual_seed(1)
    dropped = layer.lora_dropout["default"](x)
    torch.manual_seed(1)
    adapted = layer.lora_B["default"](layer.lora_A["default"](dropped)) * layer.scaling["default"]
    torch.testing.assert_close(layer(x), layer.base_layer(x) + adapted, rtol=1e-5, atol=1e-6)
    assert not torch.equal(dropped, x)


@pytest.mark.parametrize("kind", ["peft", "alone", "dropout", "compiled", "fused", "nf4"])
def test_a_small_update_is_not_rounded_away(kind: str) -> None:
    """W x in bf16, and B A x added to it, would be W x again: most of a small update would be lost."""
    plain = make_policy("qwen2", hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    if kind == "nf4":
        quantize_model(plain.model.bfloat16(), plain.device)
    policy = with_small_adapter(plain, **({"lora_dropout": 0.1} if kind == "dropout" else {}))
    exact = copy.deepcopy(policy.layers[0])
    if kind == "nf4":
        dequantize_model(exact)
    if kind == "fused":
        fuse_lora(policy.layers)
    if kind == "compiled":
        for name in PARTS_OF_A_LAYER:
            policy.layers[0].get_submodule(name).compile(backend="eager")
    if kind == "peft":
        for layer in policy.layers[0].modules():
            layer.__class__ = Linear if isinstance(layer, Linear) else layer.__class__
    for name, share in shares_kept(policy.layers[0], exact.double()).items():
        assert share < 0.4 if kind == "peft" else abs(share - 1) < 0.2, (name, share)


@pytest.mark.parametrize("model_type", ["qwen2_moe", "qwen3_moe"])
def test_experts_have_no_adapter(model_type: str) -> None:
    policy = with_lora(tiny_policy(model_type))
    names = {name for name, module in policy.layers[0].named_modules() if hasattr(module, "lora_A")}
    shared = {f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")} | {
        "mlp.shared_expert_gate"
    }
    attention = {f"self_attn.{name}_proj" for name in "qkvo"}
    assert names == (attention | shared if model_type == "qwen2_moe" else attention)
    assert not hasattr(policy.lm.get_output_embeddings(), "lora_A")
    compare_with_trainer(NativeEngine(policy, max_slots=3), policy)


def test_small_adapter_survives_merging(tmp_path) -> None:
    policy = with_small_adapter(make_policy("qwen2", hidden_size=256))
    layer = policy.layers[0].self_attn.o_proj
    base, change = layer.base_layer.weight.detach().clone(), layer.get_delta_weight("default").detach()
    policy.model.save_pretrained(tmp_path)
    model = merge_lora(policy.model.unload(), str(tmp_path))
    weight = model.model.layers[0].self_attn.o_proj.weight
    assert weight.dtype == torch.bfloat16 and weight.requires_grad
    assert abs(share_kept(weight, base, change) - 1) < 0.2
    assert share_kept(base + change, base, change) < 0.4  # rounded to the nearest


VARIANTS = pytest.mark.parametrize("settings", [{}, {"use_rslora": True}, {"use_dora": True}], ids=str)


def lora_policy(**settings) -> Policy:
    plain = make_policy()
    model = add_lora(plain.lm, ModelConfig(use_peft=True, lora_r=4, lora_alpha=12, **settings), None)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_A" not in name:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    policy = Policy(model, plain.tokenizer, plain.device)
    policy.verify()
    assert policy.is_packed
    return policy


@pytest.mark.parametrize("is_fused", [False, True], ids=["alone", "fused"])
@VARIANTS
def test_the_gradient_of_an_adapter_is_that_of_a_float64_pass(settings, is_fused: bool) -> None:
    policy = lora_policy(**settings)
    if is_fused:
        fuse_lora(policy.layers)
        for layer in (policy.layers[0].mlp.up_proj, policy.layers[0].mlp.down_proj):
            assert ("compute" in layer.__dict__) == ("use_dora" not in settings)
    samples = make_samples(policy)
    expected = reference_gradient(policy, samples, "dapo", 1.0)
    config = build(
        {"num_generations": 6, "prompts_per_step": 1, "max_steps": 4, "scale_rewards": "none", **settings}
    )
    updater = Updater(policy, config, make_plan(config, num_problems=10), None)
    updater.gradient(updater.experience_builder.build([pack(samples, 60)], num_generations=6, beta=0.0)[0])
    torch.testing.assert_close(flat_gradient(policy), expected, rtol=1e-4, atol=1e-6)


def test_layers_with_the_same_input_compute_together() -> None:
    """As each alone does, whoever is called first, with biases, and with the adapter off."""
    torch.manual_seed(0)
    policy = lora_policy()
    attention = policy.layers[0].self_attn
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    layers[1].base_layer.bias = torch.nn.Parameter(torch.randn(layers[1].out_features))
    x, other = torch.randn(2, 2, 5, layers[0].in_features)
    expected = [layer(x) for layer in layers]
    fuse_lora(policy.layers)
    for order in ([0, 1, 2], [2, 0, 1]):
        for index in order:
            torch.testing.assert_close(layers[index](x), expected[index], rtol=1e-5, atol=1e-6)
        assert layers[0].compute.input is None and not layers[0].compute.outputs
    layers[0](other)  # and no other layer: its outputs are not those for x
    torch.testing.assert_close(layers[1](x), expected[1], rtol=1e-5, atol=1e-6)
    with policy.model.disable_adapter():
        assert torch.equal(layers[2](x), layers[2].base_layer(x))


def test_gated_mlp_is_equal_with_adapter_on_and_off() -> None:
    torch.manual_seed(0)
    policy = lora_policy()
    mlp = policy.layers[0].mlp
    x = torch.randn(2, 5, mlp.gate_proj.in_features)
    kind, on = type(mlp), mlp(x)
    with policy.model.disable_adapter():
        off = mlp(x)
    fuse_lora(policy.layers)
    assert type(mlp) is not kind and isinstance(mlp, kind) and type(mlp).__name__ == kind.__name__
    torch.testing.assert_close(mlp(x), on, rtol=1e-5, atol=1e-6)
    with policy.model.disable_adapter():
        torch.testing.assert_close(mlp(x), off, rtol=1e-5, atol=1e-6)
    assert not torch.equal(on, off)


@pytest.mark.parametrize("name", ["gemma3", "phi3"])
def test_another_mlp_is_left_alone(name: str) -> None:
    """Of another activation, or with gate and up in one matrix."""
    policy = with_lora(make_policy(name))
    kind = type(policy.layers[0].mlp)
    fuse_lora(policy.layers)
    assert type(policy.layers[0].mlp) is kind


def test_a_layer_with_a_wide_input_computes_the_same() -> None:
    torch.manual_seed(0)
    policy = lora_policy()
    layer = policy.layers[1].mlp.down_proj
    layer.base_layer.bias = torch.nn.Parameter(torch.randn(layer.out_features), requires_grad=False)
    x = torch.randn(2, 5, layer.in_features, dtype=torch.float32, requires_grad=True)
    adapter = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    pull = torch.randn(2, 5, layer.out_features)

    def run() -> list[torch.Tensor]:
        output = layer(x)
        return [output, *torch.autograd.grad((output * pull).sum(), [x, *adapter])]

    expected = run()
    fuse_lora(policy.layers)
    assert layer.compute is wide_lora
    for ours, theirs in zip(run(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_layers_of_different_scales_stay_alone() -> None:
    policy = lora_policy()
    mlp = policy.layers[0].mlp
    mlp.up_proj.scaling["default"] *= 2
    fuse_lora(policy.layers)
    assert mlp.up_proj.compute is None and policy.layers[0].self_attn.q_proj.compute is not None


@VARIANTS
def test_the_engine_samples_from_the_adapter_that_is_trained(settings) -> None:
    policy = lora_policy(**settings)
    compare_with_trainer(NativeEngine(policy, max_slots=3), policy)


def test_rslora_is_lora_with_a_larger_scale() -> None:
    plain, stable = lora_layers(torch.float32), lora_layers(torch.float32, use_rslora=True)
    assert [layer.scaling["default"] for layer in plain] == [12 / 4] * len(plain)
    assert [layer.scaling["default"] for layer in stable] == [12 / 2] * len(stable)


def test_new_adapter_depends_on_the_seed_alone(monkeypatch) -> None:
    """A model that is converted or completed on its way here draws numbers, only the first time."""

    def adapter() -> torch.Tensor:
        torch.manual_seed(5)
        policy = load_policy(ModelConfig(model_name_or_path="pebble", use_peft=True, device="cpu"))
        return torch.cat([p.flatten() for p in policy.parameters() if p.requires_grad])

    def load_and_draw(*arguments):
        torch.rand(3)
        return load_pretrained(*arguments)

    first = adapter()
    monkeypatch.setattr("whetstone.model.policy.load_pretrained", load_and_draw)
    assert torch.equal(adapter(), first) and first.any()


def test_an_adapter_of_another_kind_is_not_continued(tmp_path) -> None:
    lora_policy(use_dora=True).model.save_pretrained(tmp_path)
    config = ModelConfig(use_peft=True, lora_r=4, lora_alpha=12)
    with pytest.raises(UserError, match="use_dora=True"):
        check_rank(config, str(tmp_path))
    check_rank(config.model_copy(update={"use_dora": True}), str(tmp_path))


@pytest.mark.parametrize(
    ("engine", "key"), [("vllm", "use_dora"), ("sglang", "use_dora"), ("sglang", "use_rslora")]
)
def test_engines_that_do_not_know_a_variant_refuse_it(engine, key) -> None:
    with pytest.raises(UserError, match=key):
        build({"use_peft": True, "rollout_engine": engine, key: True})
    build({"use_peft": True, "rollout_engine": "vllm", "use_rslora": True})


def test_a_critic_of_its_own_trains_all_of_its_matrices():
    policy = with_lora(make_policy("qwen3"))  # an adapter that is not zero: the critic begins with it
    flat = {"advantage": "gae", "critic": "model", "critic_warmup_steps": 0, "critic_learning_rate": 1e-3}
    updater = updater_for(policy, **flat)
    critic, batch = updater.critic, pack(make_samples(policy), 200)[0]
    assert critic is not None
    with torch.no_grad():
        critic.head.weight.normal_(generator=torch.Generator().manual_seed(0))
        hidden = policy.completion_hidden(batch)
        torch.testing.assert_close(critic.values(batch, hidden), critic.head(hidden).squeeze(-1))
    names = [name for name, _ in critic.trunk.named_parameters()]
    assert names == [name for name, _ in make_policy("qwen3").trunk.named_parameters()]
    before = [parameter.detach().clone() for parameter in critic.trunk.parameters()]
    train_on(updater, [[batch]])
    assert not any(map(torch.equal, before, critic.trunk.parameters()))
    [down, *_] = [name for name, _ in policy.model.named_parameters() if "lora_A" in name]
    assert policy.model.get_parameter(down).requires_grad  # the policy still has its adapter
