"""`python -m gracekit` is `gracekit`."""

from gracekit.cli.main import main

if __name__ == "__main__":
    main()
