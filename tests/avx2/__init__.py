"""Runs commands as on a processor with AVX2 and nothing newer."""
