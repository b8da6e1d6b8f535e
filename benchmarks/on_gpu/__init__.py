"""What only a GPU can say: whether its kernels are right, and how fast all of it is. Small shapes run in dry runs."""
