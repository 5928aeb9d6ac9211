"""Scoring in worker processes: isolated for text, with time limits for all."""
