"""An OpenAI-compatible endpoint: requests over HTTP -> a backend of tokens -> answers, whole or streamed."""
