"""`trainer: trl`: the same YAML, tasks, rewards and evaluation, sampled and trained by TRL's own GRPOTrainer.

TRL samples (transformers' generate), takes advantages and updates. The problems and their order, the prompt
tokens, the scoring, the fixed evaluation, the metrics and the run folder are ours, so two runs that differ in
`trainer` alone can be laid side by side. A key that TRL cannot honour is refused by name.
"""

from whetstone.trl.run import train_with_trl

__all__ = ["train_with_trl"]
