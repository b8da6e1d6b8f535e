"""What a response goes on with: items, those of earlier turns, and summaries in their place."""
