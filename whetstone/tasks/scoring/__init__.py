"""Scoring in worker processes: isolated for text, with a time limit for every answer."""
