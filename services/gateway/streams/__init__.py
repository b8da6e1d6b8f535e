"""What clients read of a generation: from its log to text, chunks and whole responses."""
