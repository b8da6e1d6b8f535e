"""A service for tests: ends with an error when it has an argument, else waits for a signal."""

import signal
import sys

if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit("error: The port is taken.")
    signal.pause()
