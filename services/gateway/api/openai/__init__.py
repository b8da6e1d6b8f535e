"""The routes of OpenAI's API, and those of vLLM beside it."""
