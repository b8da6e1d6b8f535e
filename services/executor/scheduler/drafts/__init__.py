"""Drafts in steps: who proposes them, which pay, and what has come of them. Imports no planning."""
