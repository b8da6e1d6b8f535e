"""What servers speak, a module for each kind."""
