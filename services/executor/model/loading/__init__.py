"""From what a user names to weights in memory."""
