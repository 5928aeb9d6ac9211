"""Predicted time and memory of a configuration."""
