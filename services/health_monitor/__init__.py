"""Failure detection: which groups and services are ready, busy, hung or gone."""
