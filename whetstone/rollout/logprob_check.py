"""Check that the engine samples from the trainer's weights: its logprobs must match the trainer's."""

import math
from collections.abc import Mapping

from whetstone.config import Config
from whetstone.config.engine_traits import engine_traits
from whetstone.errors import UserError

STALE_FACTOR = 10  # for stale samples


def check_logprob_difference(metrics: Mapping[str, float], config: Config, staleness: float = 0.0) -> None:
    """Raise a UserError when the difference is more than rounding.

    top_p raises the engine's logprobs by at most -log(top_p) per token. top_k and min_p have no bound: with
    them nothing is checked.
    """
    if config.loss.is_supervised or config.rollout.top_k or config.rollout.min_p:
        return
    if staleness and engine_traits(config.rollout.rollout_engine).in_process:
        return  # an in-process copy can't miss an update
    difference = metrics["sampling/sampling_logp_difference/mean"]
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
