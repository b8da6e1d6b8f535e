"""What the ranks of a group say to each other about tensors."""
