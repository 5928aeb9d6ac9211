"""A trained model for others: a merged folder, a GGUF file, a repository on the hub."""
