"""Anthropic's API: messages, their tokens, message batches."""
