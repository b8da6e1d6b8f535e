"""Text to tokens and back, and tokens to what a client is shown."""
