"""The load client for people: any server with OpenAI's chat completions, `python -m benchmarks.serve --help`."""
