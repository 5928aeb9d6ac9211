"""Processes that start in milliseconds: forked from one that has imported what they need and done nothing
else.

multiprocessing has one such server for each process, and the preload that was set last is the one that
counts. So all tests share this one.
"""

import multiprocessing

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([
    "peft",
    "torch.distributed.tensor",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "mistral", "qwen2", "qwen3")),
    "tests.distributed.test_update",
    "tests.hopper.linear_on_cpu",
])  # fmt: skip
