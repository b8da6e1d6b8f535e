"""What ranks compute on: memory, copies and events of its devices, and what kernels there take (`catalog.py`)."""
