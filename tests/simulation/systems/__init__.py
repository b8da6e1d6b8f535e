"""What a simulation runs: the deployment with its clients and promises, or a toy that shows how the search works."""
