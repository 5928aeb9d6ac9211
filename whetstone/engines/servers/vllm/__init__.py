"""vLLM 0.22 to 0.32, as a server or in this process. Only this package knows the differences of versions."""
