"""`python -m attnres` is the command line."""

from attnres.cli import main

if __name__ == "__main__":
    main()
