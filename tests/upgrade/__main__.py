"""`python -m tests.upgrade --record`: writes down the messages of this release, as those of the previous one from now
on; --install: only makes the previous release's environment."""

import argparse

from tests.upgrade import messages
from tests.upgrade.previous_release import NAME, installed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="Write the messages of this release to messages.msgpack.")
    parser.add_argument("--install", action="store_true", help="Make the previous release's environment.")
    arguments = parser.parse_args()
    if arguments.record:
        messages.record()
    if arguments.install:
        print(f"{NAME}: {installed()}")


if __name__ == "__main__":
    main()
