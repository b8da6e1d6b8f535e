"""Who is alive, busy, hung or gone. Writes the states that everybody else reads."""
