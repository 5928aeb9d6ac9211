"""Named ranges of a step, by which `whet profile` attributes kernels. A range costs about a microsecond."""

from torch.profiler import record_function

PREFIX = "whet:"


def profile_range(name: str) -> record_function:
    """`with profile_range("forward"): ...`"""
    return record_function(PREFIX + name)
