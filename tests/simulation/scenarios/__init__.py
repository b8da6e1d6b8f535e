"""Which services, how many, which clients, which faults how often: one YAML file each, read by `scenario.py`."""
