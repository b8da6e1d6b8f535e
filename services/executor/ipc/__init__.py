"""What processes of one ring tell each other: tables in shared memory, messages over pipes and sockets."""
