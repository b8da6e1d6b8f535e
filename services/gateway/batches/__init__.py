"""OpenAI's batches: JSON lines in, JSON lines out, each line generated once (docs/batch.md, ADR 0014)."""
