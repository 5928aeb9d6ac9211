"""`trainer: trl`: the same YAML, tasks, rewards and evaluation, trained by TRL's own GRPOTrainer."""

from whetstone.trl.run import train_with_trl

__all__ = ["train_with_trl"]
