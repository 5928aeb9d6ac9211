"""flash-linear-attention with a Triton that it refuses: torch's rule instead."""

import os
import subprocess
import sys

import pytest

from whetstone.model.fla import fla_problem


@pytest.mark.parametrize(
    "version, capability, is_refused",
    [
        ("3.3.1", (9, 0), False),
        ("3.4.0", (9, 0), True),
        ("3.6.0", (9, 0), True),
        ("3.7.0+git1", (9, 0), True),
        ("3.7.1", (9, 0), False),
        ("4.0", (9, 0), False),
        ("3.6.0", (8, 0), False),
        ("3.6.0", (10, 0), False),
    ],
)
def test_the_versions_and_gpus_that_it_refuses(version, capability, is_refused):
    problem = fla_problem(version, capability)
    assert (problem is not None) == is_refused
    assert problem is None or version in problem


# A package that refuses to compute, in the place where transformers looks for the real one.
FLA = "def chunk_gated_delta_rule(q, k, v, g, beta, **_): raise RuntimeError('Triton >= 3.4.0 and < 3.7.1')"
CODE = """
import torch
from tests.conftest import TINY
from tests.support.models import MODELS
from whetstone.model.fla import block_fla
BLOCK
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**TINY, **MODELS["qwen3_5_text"][1]}))
model(torch.arange(9)[None]).logits.sum().backward()
print(sum(float(p.grad.abs().sum()) > 0 for p in model.parameters()), len(list(model.parameters())))
"""


@pytest.mark.parametrize("is_blocked", [True, False])
def test_a_blocked_package_is_not_used(tmp_path, is_blocked):
    (tmp_path / "fla" / "ops" / "gated_delta_rule").mkdir(parents=True)
    for folder in ("fla", "fla/ops", "fla/ops/gated_delta_rule"):
        (tmp_path / folder / "__init__.py").write_text(FLA)
    code = CODE.replace("BLOCK", "block_fla()" if is_blocked else "")
    paths = os.pathsep.join([str(tmp_path), os.getcwd()])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    if is_blocked:
        assert done.returncode == 0, done.stderr
        trained, number = map(int, done.stdout.split())
        assert trained == number
    else:  # else the test proves nothing
        assert "Triton >= 3.4.0" in done.stderr
