"""Who asks: API keys, what stands behind them, and the header that carries them."""
