"""Policies on a GPU."""

import torch

from tests.conftest import make_policy
from whetstone.model.policy import Policy

# Flash attention wants heads of at least 16 numbers or so.
WIDE = {"head_dim": 32, "hidden_size": 128}


def on_gpu(architecture: str, dtype: torch.dtype = torch.float32, **changes) -> Policy:
    policy = make_policy(architecture, **{**WIDE, **changes})
    return Policy(policy.model.to(device="cuda", dtype=dtype), policy.tokenizer, torch.device("cuda"))
