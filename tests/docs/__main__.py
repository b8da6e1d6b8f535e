"""`python -m tests.docs`: a table that is made of the code, or how many lines of Python there are."""

import argparse

from tests.docs.lines import sums
from tests.docs.tables import TABLES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", nargs="?", choices=TABLES, help="Print it; without: lines of Python.")
    table = parser.parse_args().table
    print(TABLES[table]() if table else "\n".join(sums()))


if __name__ == "__main__":
    main()
