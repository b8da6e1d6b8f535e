"""Models that read a text in both directions: embedders, cross-encoders and other classifiers."""
