"""Models from one format of files into another, and what a file holds."""
