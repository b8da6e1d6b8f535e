"""OpenAI's files: in NATS, streamed in and out."""
