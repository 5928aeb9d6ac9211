"""A run on disk: its folder, checkpoints, metrics, progress, signals."""
