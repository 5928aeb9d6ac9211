"""Sample from a model: that of a run, a checkpoint, a model folder or a name (`Sampler`, `Conversation`)."""
