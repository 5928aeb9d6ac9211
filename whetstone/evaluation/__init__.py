"""The fixed evaluation and its statistics."""
