"""A GPU that is not there: see `device.py`."""
