"""`trainer: trl`: the same YAML, tasks, rewards and evaluation, sampled and trained by TRL's own GRPOTrainer.

Problems, prompts, scoring, evaluation, metrics and run folder are ours, so that runs can be compared. A key
that TRL does not have is rejected by name.
"""

from whetstone.trl.run import train_with_trl

__all__ = ["train_with_trl"]
