"""What accelerate hands over in its environment variables, as accelerate 1.15 sets them for a file."""

import json
import re

import pytest

from whetstone.config import load
from whetstone.config.accelerate import check_launcher
from whetstone.errors import UserError

ZERO3 = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_CONFIG_DS_FIELDS": "gradient_clipping,zero_stage",
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
    "ACCELERATE_GRADIENT_CLIPPING": "0.5",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
}
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "FSDP_VERSION": "2",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
}


@pytest.fixture
def asked(monkeypatch):
    """The configuration and the notes of a run that accelerate started with these variables."""

    def loaded(environment, *settings, source=None):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        found = load(source, settings)
        return found.config, found.notes, found.origins

    return loaded


def test_zero3_is_taken_over_with_one_line_each(asked):
    config, notes, origins = asked(ZERO3)
    assert (config.model.bf16, config.update.max_grad_norm) == (True, 0.5)
    assert (config.rollout.gradient_accumulation_steps, config.parallel.cpu_offload) == (4, "optimizer")
    assert origins == dict.fromkeys(
        ("bf16", "max_grad_norm", "gradient_accumulation_steps", "cpu_offload"), "accelerate"
    )
    assert sorted(notes) == [
        "gradient_accumulation_steps 4 (accelerate) is taken for gradient_accumulation_steps: 4.",
        "gradient_clipping 0.5 (accelerate) is taken for max_grad_norm: 0.5.",
        "mixed_precision bf16 (accelerate) is taken for bf16: true.",
        "offload_optimizer_device cpu (accelerate) is taken for cpu_offload: optimizer.",
    ]


def test_the_configuration_of_the_run_wins(asked, tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("bf16: true\nmax_grad_norm: 0.2\n")
    config, notes, _ = asked(ZERO3, "cpu_offload=all", "gradient_accumulation_steps=2", source=file)
    assert (config.update.max_grad_norm, config.rollout.gradient_accumulation_steps) == (0.2, 2)
    assert notes == (
        "gradient_accumulation_steps 4 (accelerate) has no effect: gradient_accumulation_steps is 2 "
        "(command line).",
        "gradient_clipping 0.5 (accelerate) has no effect: max_grad_norm is 0.2 (own.yaml).",
    )  # bf16 and the offload of the optimizer are as asked


def test_a_precision_under_another_name_wins_too(asked, tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("torch_dtype: float32\n")
    config, notes, _ = asked({"ACCELERATE_MIXED_PRECISION": "bf16"}, source=file)
    assert not config.model.bf16
    assert "mixed_precision bf16 (accelerate) has no effect: bf16 is false (own.yaml)." in notes


def test_parts_of_a_batch_count_the_accumulation(asked):
    """updates_per_rollout is steps_per_generation in parts of so many steps."""
    config, _, _ = asked(ZERO3, "updates_per_rollout=2")
    assert (config.rollout.gradient_accumulation_steps, config.rollout.steps_per_generation) == (4, 8)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}, "zero_stage 2 .*as in stage 3"),
        ({"ACCELERATE_DEEPSPEED_ZERO3_INIT": "true"}, "zero3_init true .*the first rank loads"),
        ({"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "nvme"}, "offload_optimizer_device nvme .*set"),
        ({"ACCELERATE_GRADIENT_CLIPPING": "auto"}, "gradient_clipping auto .*the run decides"),
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, "mixed_precision fp8 .*float32 or bf16"),
        ({"ACCELERATE_DYNAMO_BACKEND": "EAGER"}, "dynamo_backend eager .*inductor"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "use_megatron_lm true .*tp_size"),
        ({"ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "A,B"}, "moe_layer_cls_names a,b .*nothing here"),
    ],
)
def test_what_has_no_effect_is_named(asked, changed, named):
    _, notes, _ = asked({**ZERO3, **changed})
    (line,) = [note for note in notes if "has no effect" in note]
    assert re.match(named, line), line


def test_plain_processes_and_fsdp_as_it_is_here_need_no_line(asked):
    config, notes, origins = asked(FSDP)
    assert (notes, origins, config) == ((), {}, load(None).config)


def test_fsdp_is_taken_over(asked):
    changed = {
        "FSDP_OFFLOAD_PARAMS": "true",
        "FSDP_ACTIVATION_CHECKPOINTING": "true",
        "FSDP_VERSION": "1",
        "FSDP_SHARDING_STRATEGY": "HYBRID_SHARD",
        "ACCELERATE_MIXED_PRECISION": "fp16",
        "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_TP_SIZE": "2",
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "4",
        "PARALLELISM_CONFIG_CP_SIZE": "8",
    }
    config, notes, _ = asked(FSDP | changed)
    assert (config.parallel.cpu_offload, config.model.gradient_checkpointing) == ("all", True)
    assert (config.model.bf16, config.model.torch_compile) == (True, True)
    assert (config.parallel.tp_size, config.parallel.ddp_size) == (2, 4)
    assert [note.split()[0] for note in notes if "has no effect" in note] == [
        "fsdp_version",
        "fsdp_sharding_strategy",
        "parallelism_config_cp_size",
    ]


def test_a_json_file_of_deepspeed(asked, tmp_path):
    file = tmp_path / "ds.json"
    zero = {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "zero_quantized_weights": True,
    }
    file.write_text(
        json.dumps(
            {
                "zero_optimization": zero,
                "bf16": {"enabled": True},
                "fp16": {"enabled": False},
                "gradient_clipping": "auto",
                "train_micro_batch_size_per_gpu": 16,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
            }
        )
    )
    environment = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_MIXED_PRECISION": "no"}
    config, notes, origins = asked({**environment, "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)})
    assert (config.model.bf16, config.parallel.cpu_offload) == (True, "all")
    assert config.rollout.per_device_train_batch_size == 16
    assert set(origins.values()) == {"ds.json"}
    assert sorted(notes) == [
        "bf16.enabled true (ds.json) is taken for bf16: true.",
        "gradient_clipping auto (ds.json) has no effect: the configuration of the run decides.",
        "optimizer.params.lr 1e-05 (ds.json) has no effect: set learning_rate.",
        "optimizer.type adamw (ds.json) has no effect: set optim and its keys.",
        "train_micro_batch_size_per_gpu 16 (ds.json) is taken for per_device_train_batch_size: 16.",
        "zero_optimization.offload_param.device cpu (ds.json) is taken for cpu_offload: all.",
        "zero_optimization.offload_param.pin_memory true (ds.json), zero_optimization.overlap_comm true "
        "(ds.json) have no effect: nothing here depends on it.",
        "zero_optimization.zero_quantized_weights true (ds.json) has no effect: there is no ZeRO++; for "
        "replicas of the shards set ddp_size.",
    ]


@pytest.mark.parametrize(
    ("content", "named"),
    [(None, "No such file"), ("{", "can't be read as JSON"), ("[1]", "can't be read as JSON")],
)
def test_a_json_file_that_cannot_be_read_is_refused(asked, tmp_path, content, named):
    file = tmp_path / "ds.json"
    if content is not None:
        file.write_text(content)
    environment = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}
    with pytest.raises(UserError, match=f"{file}.*{named}" if content is None else named):
        asked(environment)


@pytest.mark.parametrize("value", ["four", "0", "{"])
def test_a_number_that_is_none_is_refused_by_its_key(asked, value):
    with pytest.raises(UserError, match="gradient_accumulation_steps"):
        asked({**ZERO3, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": value})


def test_what_tells_that_ranks_are_missing():
    asked = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with pytest.raises(UserError, match="--multi_gpu"):
        check_launcher(asked)
    check_launcher({**asked, "WORLD_SIZE": "1"})  # as torchrun tells a rank of one
    check_launcher({"ACCELERATE_MIXED_PRECISION": "no"})  # --num_processes 1
    check_launcher({"MASTER_ADDR": "node1", "MASTER_PORT": "29500"})  # left over from elsewhere
