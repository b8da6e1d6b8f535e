"""Ollama's API: generating, models, downloads."""
