"""From the body of a request to its generations."""
