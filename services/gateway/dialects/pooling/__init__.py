"""Vectors, and what is made of them: embeddings, ranks, scores and classes."""
