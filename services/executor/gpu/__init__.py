"""What computes a rank's steps on a GPU (docs/adr/0020-gpu-decoder.md)."""
