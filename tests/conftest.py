"""Tiny real models and a character tokenizer, shared by the tests: random weights, real architectures."""

import contextlib
import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from whetstone.model.policy import Policy

# One thread for each of several workers: threads of small products would wait for each other. For the
# processes that tests start, too; before torch reads it.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    """The process that only hands out tests to workers imports no torch: they wait for it."""
    if "PYTEST_XDIST_WORKER" in os.environ or not config.getoption("numprocesses", None):
        import torch

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))


# They share a process that ranks are forked from (tests/support/forkserver.py). It takes 7 s to start, so one
# worker runs them all.
FORKING = (
    "distributed/test_update.py",
    "distributed/test_memory.py",
    "distributed/test_heartbeat.py",
    "distributed/test_compiled.py",
    "hopper/test_attention.py",
    "hopper/test_linear.py",
    "hopper/test_gated.py",
)
# The files that take longest. They come first: no worker is left with one when the others are done.
LONGEST = (
    *FORKING,
    "engines/test_kernels.py",
    "e2e/test_resume.py",
    "e2e/test_train.py",
    "tasks/test_scoring.py",
    "update/test_sft.py",
    "engines/test_server_pool.py",
    "update/test_against_trl.py",
    "model/test_architectures.py",
    "diagnosis/test_explain.py",
    "config/test_recipes.py",
    "rollout/agents/test_agents.py",
    "model/test_compiled.py",
    "environments/test_episodes.py",
    "environments/test_pool.py",
    "sandbox/test_hostile.py",
    "benchmarks/test_trl.py",
    "tasks/test_gym_junk.py",
    "run/test_preflight.py",
    "torture/test_torture.py",
    "update/test_gradient.py",
    "update/test_updater.py",
    "export/test_export.py",
    "serving/test_tools.py",
    "e2e/test_servers.py",
    "docs/test_python.py",
    "docs/test_commands.py",
    "rollout/test_rollout_func.py",
    "engines/test_native.py",
    "tasks/test_code.py",
    "tasks/test_gym.py",
    "commands/test_cli.py",
    "commands/test_profile.py",
    "docs/test_metrics.py",
    "docs/test_data.py",
    "rewards/test_bad_rewards.py",
    "optimizer/test_optimizer.py",
    "model/test_model_folders.py",
    "serving/test_api.py",
    "tasks/test_own_rows.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class FilesOfOneServer(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "forking" if file.endswith(FORKING) else file

    return FilesOfOneServer(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Each worker imports another part of the tests first, and finds the bytecode of the rest: in a new clone
    each would compile all of them, 6 s of its time.
    """
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if count == 1 or session.config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    folder = Path(__file__).parent
    files = sorted(folder.rglob("test_*.py"))
    start = len(files) * number // count
    for file in files[start:] + files[:start]:
        # One that can't be imported here is reported, or skipped, when it is collected.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(file.relative_to(folder.parent).with_suffix("").parts))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    places = {folder / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """Some tests print lone surrogates on purpose: a report sent between processes can't hold them."""
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections
    ]
    return report


TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ARCHITECTURES = {
    "llama": ("LlamaConfig", {}),
    "smollm": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "gemma2": ("Gemma2Config", {"sliding_window": 8, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 8, "query_pre_attn_scalar": 8}),
    "phi3": ("Phi3Config", {}),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 4}),  # the last of four layers rotates nothing
}


class Characters:
    """The least a policy needs of a tokenizer: ids of the special tokens, and characters for the rest."""

    pad_token_id, eos_token_id, eos_token, chat_template = 0, 2, "<e>", None

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [ord(character) - 30 for character in text]}

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(i + 30) for i in ids if i > 2)

    def save_pretrained(self, folder):
        (folder / "tokenizer.txt").write_text("characters")


def make_policy(architecture: str = "llama", seed: int = 0, **changes) -> "Policy":
    import torch
    import transformers

    from whetstone.model.policy import Policy

    name, settings = ARCHITECTURES[architecture]
    config = getattr(transformers, name)(**{**TINY, **settings, **changes})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    # Larger weights, so that logits differ clearly between tokens and attention matters.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return Policy(model.float(), Characters(), torch.device("cpu"))


@pytest.fixture
def policy() -> "Policy":
    return make_policy()
