"""What bare servers and bare messages cost: the floor under the control plane's figures."""
