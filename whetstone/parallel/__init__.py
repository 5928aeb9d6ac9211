"""Several processes as one trainer: the only room, beside checkpoint.py, that knows torch.distributed."""
