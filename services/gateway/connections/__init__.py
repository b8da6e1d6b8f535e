"""What a client can do to a connection before and beside its requests: slowly, hugely, endlessly."""
