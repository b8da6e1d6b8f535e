"""vLLM in a process and an environment of its own."""
