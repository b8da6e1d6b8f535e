"""Answers that outlive the journal: responses and stored chat completions."""
