"""A world of hosts and processes whose clock, order and network follow from a seed. It knows no service."""
