"""Which group a request goes to, and what a scheduler knows of the groups."""
