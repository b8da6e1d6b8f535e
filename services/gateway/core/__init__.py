"""What every layer uses: errors, settings, metrics, ASGI helpers, pages of lists, the catalog of models."""
