"""`python -m gracekit` is `gracekit`."""

import sys

if not sys.flags.safe_path:
    # Python has put the working directory here. `gracekit run --app-dir` decides where an
    # application is imported from; nothing else may come from wherever somebody happens to be.
    del sys.path[0]

from gracekit.cli.main import main

if __name__ == "__main__":
    main()
