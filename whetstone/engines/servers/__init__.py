"""Rollout servers (vLLM, SGLang): starting, pooling, weight updates."""
