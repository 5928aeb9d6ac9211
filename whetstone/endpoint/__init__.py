"""OpenAI's HTTP interface without a model: bodies, messages, answers in its shapes, the server."""
