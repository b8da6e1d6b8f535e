"""`python -m tests.interfaces`: what has changed of what others build on, or with --record, the lists anew."""

import argparse
import sys

from tests.interfaces.recorded_lists import KINDS, changes, record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", nargs="*", choices=[[], *KINDS], help="Which; without: all.")
    parser.add_argument("--record", action="store_true", help="Write the lists anew.")
    arguments = parser.parse_args()
    changed = False
    for kind in arguments.kind or KINDS:
        for line in changes(kind):
            changed = True
            print(f"{kind}: {line}")
        if arguments.record:
            record(kind)
    if changed and not arguments.record:
        sys.exit(1)


if __name__ == "__main__":
    main()
