"""A run folder with checkpoints."""

import contextlib

import torch

from tests.conftest import make_policy
from whetstone.config import build
from whetstone.model.sharded import model_writer
from whetstone.run import checkpoint
from whetstone.run.folder import open_run


class NoTokenizer:
    def save_pretrained(self, folder):
        (folder / "tokenizer.json").write_text('{"characters": true}')


def save(run, step, keep=None):
    policy = make_policy(seed=step)
    policy.tokenizer = NoTokenizer()
    moment = torch.full((2,), float(step))
    saver = checkpoint.Saver(run, keep)
    saver.save(
        checkpoint.CheckpointData(
            step=step,
            write_model=model_writer(policy),
            tensors={"optimizer": {"moment": moment}},
            scalars={"seconds": 1.5, "steps_done": step},
        )
    )
    with torch.no_grad():  # the run goes on while it is being written
        moment.add_(1)
        for parameter in policy.parameters():
            parameter.add_(1)
    saver.finish()
    return run / f"checkpoint-{step}"


def config_in(folder, **keys):
    return build({"output_dir": str(folder), "run_name": "r", **keys})


def opened(config):
    """What `open_run` found, without the lock."""
    with contextlib.ExitStack() as stack:
        return open_run(config, stack)
