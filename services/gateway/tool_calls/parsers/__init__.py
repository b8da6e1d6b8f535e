"""One parser per notation of tool calls."""
