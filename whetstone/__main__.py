"""`python -m whetstone` is `whet`."""

from whetstone.cli import main

if __name__ == "__main__":
    main()
