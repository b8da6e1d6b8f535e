"""What a request is to read: its conversation, texts or inputs, and how their tokens are kept."""
