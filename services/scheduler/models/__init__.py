"""Which host loads which model: what is known of hosts and demand, the placement, and the scheduler that decides."""
