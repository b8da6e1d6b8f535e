"""The pure parts of files and batches."""
