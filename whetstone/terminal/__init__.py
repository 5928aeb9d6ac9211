"""Output for people: text, stages of a run, the live line, the log."""
