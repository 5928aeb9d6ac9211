"""Advice before and after a run. Reads configuration, metrics and the machine; never trains."""
