"""What the supervisor finds out of a group from outside: dumps, profiles, a verdict."""
