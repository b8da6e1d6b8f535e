"""Several models on one machine that has room for one of them."""
