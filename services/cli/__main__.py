"""`python -m services.cli` is the command `ryzanstein`."""

from services.cli.entry import main

if __name__ == "__main__":
    main()
