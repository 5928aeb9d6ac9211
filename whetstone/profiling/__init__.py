"""`whet profile`: a few real steps of a configuration, where their time went, and what to try."""

from whetstone.profiling.run import profile

__all__ = ["profile"]
