"""What clients read: from a generation's log to text, chunks and whole responses."""
