"""Whetstone: reinforcement learning for language models on problems whose answers can be checked."""

__version__ = "0.1.0"
