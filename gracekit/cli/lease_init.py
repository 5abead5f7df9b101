"""Process 1 in the pid namespace of `gracekit lease run`: starts the command, and ends as it ends.

The kernel then ends all other processes of the namespace, before the keeper sees the end of this
one. Started as a program, by `python -I lease_init.py FD CMD...`: it must not load gracekit.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from typing import Final

PASSED_ON: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
NOT_STARTED: Final = 126  # as shells say of a file that cannot be run


def main(keeper_lives: int, command: list[str]) -> int:
    """Run *command*; returns its exit code, as a shell would say it.

    The keeper alone has the pipe *keeper_lives* open for writing.
    """
    # From here on the kernel ends this process with the keeper. If the keeper died before it had
    # asked for that, nobody holds the lease.
    if select.select([keeper_lives], [], [], 0)[0]:
        return NOT_STARTED
    os.close(keeper_lives)

    # Blocked before the command is started, so that `sigwait` misses none of them.
    heard = {*PASSED_ON, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    unblock = lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, heard)  # noqa: E731
    try:
        child = subprocess.Popen(command, preexec_fn=unblock)  # noqa: S603, PLW1509 - no threads
    except OSError as error:
        print(f"Error: {command[0]} cannot be run: {error.strerror}", file=sys.stderr)
        return NOT_STARTED
    while child.returncode is None:
        if (number := signal.sigwait(heard)) != signal.SIGCHLD:
            child.send_signal(number)
        while child.returncode is None and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child.pid:  # and no orphan of the namespace
                child.returncode = os.waitstatus_to_exitcode(ended[1])
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
