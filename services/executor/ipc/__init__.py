"""What processes of one group tell each other: tables in shared memory, messages over pipes and sockets."""
