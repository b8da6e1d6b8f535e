"""The life of a generation: handed in, followed, recovered, taken over, cancelled, recorded."""
