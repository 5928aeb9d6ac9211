"""Runs untrusted programs in isolation. `pool.py` is the entry point; docs/sandbox.md has the threat model.

Imports nothing of whetstone but `errors`: every sandbox process imports this package at its start.
"""
