"""Does the engine sample from the trainer's weights? Its logprobs of a batch against the trainer's own, after
every push: a wrong one can't pass in silence.

The update computes both anyway (`sampling/sampling_logp_difference/mean`); here the bound is checked.
"""

import math
from collections.abc import Mapping

from whetstone.config import Config
from whetstone.errors import UserError

STALE_FACTOR = 10  # for samples of older weights, which the policy has left by an update


def check_sync(row: Mapping[str, float], config: Config, staleness: float = 0.0) -> None:
    """`UserError` when the difference can't be rounding. Filters raise the engine's logprobs, by at most
    -log(top_p) a token; what top_k and min_p add has no bound, so with them it is only logged.
    """
    if config.rollout.top_k or config.rollout.min_p:
        return
    if staleness and config.rollout.rollout_engine in ("native", "hf"):
        return  # a copy in this process can't miss a push, and how far the policy has moved is its own affair
    difference = row["sampling/sampling_logp_difference/mean"]
    allowed = config.engines.max_logprob_difference * (STALE_FACTOR if staleness else 1)
    bound = allowed - math.log(config.rollout.top_p)
    if difference <= bound:
        return
    name = config.rollout.rollout_engine
    raise UserError(
        f"The {name} engine's logprobs differ from the trainer's by {difference:.3g} a token in the mean (at "
        f"most {bound:.3g} is allowed, see max_logprob_difference): it does not sample "
        "from the trainer's weights, and this step should not count. Go on from the last checkpoint with "
        "weight_transfer=disk or rollout_engine=native; if the engine merely computes this model less "
        "exactly, raise max_logprob_difference and set importance_correction=token_truncate."
    )
