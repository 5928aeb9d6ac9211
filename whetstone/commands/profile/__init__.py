"""`whet profile`: a few real steps of a configuration, where their time went, and what to try."""

from whetstone.commands.profile.run import profile

__all__ = ["profile"]
