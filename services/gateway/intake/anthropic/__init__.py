"""Anthropic's Messages API: its requests, and the chat completions that they become."""
