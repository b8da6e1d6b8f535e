"""Rerank, score and classify requests: their bodies, and the prompts whose vectors become scores."""
