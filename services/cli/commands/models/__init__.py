"""`ryzanstein models`: what a running stack or cluster serves, and what lies on this machine."""
