"""What vLLM has beside OpenAI's API: tokens, and one path for all bodies."""
