"""Tensor parallelism: how a transformers model is split over ranks."""
