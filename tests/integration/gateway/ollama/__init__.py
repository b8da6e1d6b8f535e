"""Ollama's API at a gateway with a fake ring."""
