"""`ryzanstein launch`: coding agents and editors, started with the settings that lead them to a gateway."""
