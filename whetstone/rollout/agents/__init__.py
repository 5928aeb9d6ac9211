"""Rollouts by agents that bring their own loop: an endpoint of the policy with a session for each rollout."""
