"""OpenAI's responses and conversations."""
