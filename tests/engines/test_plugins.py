"""An engine in a file of the user, `rollout_engine: my_engine.py:Engine`."""

from pathlib import Path

import pytest

from tests.conftest import make_policy
from whetstone.__main__ import run
from whetstone.config import build, load
from whetstone.config.engine_traits import ENGINE_TRAITS, engine_traits
from whetstone.engines import ENGINES, make_engine
from whetstone.engines.packages import check_packages
from whetstone.errors import UserError

ENGINE = '''
import torch

from whetstone.engines.base import GenerationOutput
from whetstone.model.attention import NAME
from whetstone.types import Completion, Finish


class Engine:
    """Plain sampling without a cache, one sequence at a time."""

    def __init__(self, config, policy):
        self.policy, self.version = policy, 0

    @torch.inference_mode()
    def generate(self, requests, sampling):
        self.policy.model.eval()
        self.policy.set_attention("eager")
        outputs = [
            GenerationOutput(
                request=r, sample=s, completion=self.complete(request.prompt_ids, seed, sampling)
            )
            for r, request in enumerate(requests)
            for s, seed in enumerate(request.seeds)
        ]
        self.policy.set_attention(NAME)
        return iter(outputs)

    def complete(self, prompt, seed, sampling):
        generator = torch.Generator().manual_seed(seed % 2**32)
        tokens, logprobs, finish = [], [], Finish.LENGTH
        while len(tokens) < sampling.max_tokens and finish is Finish.LENGTH:
            logits = self.policy.lm(torch.tensor([[*prompt, *tokens]])).logits[0, -1].float()
            distribution = (logits / (sampling.temperature or 1.0)).log_softmax(-1)
            token = int(torch.multinomial(distribution.exp(), 1, generator=generator))
            tokens.append(token)
            logprobs.append(float(distribution[token]))
            finish = Finish.STOP if token in self.policy.stop_token_ids else Finish.LENGTH
        return Completion(
            token_ids=tuple(tokens), logprobs=tuple(logprobs), finish=finish, policy_version=self.version
        )

    def update_weights(self, policy_version):
        self.version = policy_version

    def sleep(self): ...
    def wake(self): ...
    def close(self): ...


class Half:
    def generate(self, requests, sampling): ...
'''


@pytest.fixture
def spec(tmp_path: Path) -> str:
    (tmp_path / "my_engine.py").write_text(ENGINE)
    return f"{tmp_path}/my_engine.py:Engine"


@pytest.mark.parametrize("more", [[], ["async_rollouts=1"]])
def test_it_trains(tmp_path: Path, spec: str, more: list[str]) -> None:
    settings = f"output_dir={tmp_path} run_name=own max_steps=2 prompts_per_step=2 num_generations=2"
    limits = "max_completion_length=4 eval_num_samples=0 reward_workers=1"
    words = [f"rollout_engine={spec}", *settings.split(), *limits.split(), *more]
    assert run(["train", "quickstart", *words]) == 0
    rows = (tmp_path / "own" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) >= 2


def test_every_engine_has_traits_and_a_constructor() -> None:
    assert list(ENGINES) == list(ENGINE_TRAITS)
    assert engine_traits("my_engine.py:Engine").in_process


def test_what_is_missing_is_named(tmp_path: Path, spec: str) -> None:
    with pytest.raises(UserError, match=r"rollout_engine names 'absent\.py:Engine', but there is no file"):
        check_packages(load("quickstart", ["rollout_engine=absent.py:Engine"]).config)
    check_packages(load("quickstart", [f"rollout_engine={spec}"]).config)
    with pytest.raises(UserError, match="has no method update_weights"):
        make_engine(build({"rollout_engine": spec.replace("Engine", "Half")}), make_policy())
