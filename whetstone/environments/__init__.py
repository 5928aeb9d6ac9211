"""Environments: tasks of several turns, each episode in a process of its own."""
