"""What is measured on a GPU: the sections of `python -m benchmarks.gpu`, each in a process of its own."""
