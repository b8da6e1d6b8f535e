"""Communication between the processes of a group: tables in shared memory, messages over pipes and sockets."""
