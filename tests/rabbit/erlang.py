"""Erlang as a node's helper: what is installed, the names of nodes, orders into a node.

`erl_call` brings an order in some 10 ms where `rabbitmqctl` takes seconds.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

from tests.rabbit.machine import HOST, WAIT_S, Guard, connects, free_ports, wait_until

# Debian's own start script insists on root or the user rabbitmq; the one behind it does not.
_DEBIAN: Final = "lib/rabbitmq/lib/rabbitmq_server-*/sbin/rabbitmq-server"


class NoRabbitError(Exception):
    """There is no RabbitMQ to start: run `make test`, which installs it, or install it yourself."""


def find_server() -> Path:
    """The program that starts a node as whoever calls it."""
    found = sorted(Path("/usr").glob(_DEBIAN))
    if found:
        return found[-1]
    if elsewhere := shutil.which("rabbitmq-server"):
        return Path(elsewhere)
    raise NoRabbitError(NoRabbitError.__doc__)


def find_erlang(tool: str) -> Path:
    """A program that comes with Erlang."""
    if found := shutil.which(tool):
        return Path(found)
    if erl := shutil.which("erl"):
        root = Path(erl).resolve().parent.parent
        for inside in (f"bin/{tool}", f"erts-*/bin/{tool}", f"lib/erl_interface-*/bin/{tool}"):
            if beside := sorted(root.glob(inside)):
                return beside[-1]
    raise NoRabbitError(f"no {tool}, which comes with Erlang")


class Epmd:
    """The names of nodes, on a port of its own."""

    def __init__(self) -> None:
        (self.port,) = free_ports(1)
        self._guard = Guard()
        self._process = subprocess.Popen(
            [find_erlang("epmd")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=self.environment | {"PATH": os.environ["PATH"]},
            start_new_session=True,
        )
        self._guard.watch(self._process.pid)
        wait_until(lambda: self._process.poll() is not None or connects(self.port), "epmd")
        assert self._process.poll() is None, "epmd ended"

    @property
    def pids(self) -> list[int]:
        return [self._process.pid, self._guard.pid]

    @property
    def environment(self) -> dict[str, str]:
        return {"ERL_EPMD_PORT": str(self.port), "ERL_EPMD_ADDRESS": HOST}

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._guard.close()


class ErlCall:
    """Evaluates Erlang in a node.

    Args:
        home: Where the node's cookie is.
        port: Its port of distribution.
    """

    def __init__(self, home: Path, port: int) -> None:
        self._program = find_erlang("erl_call")
        self._home = home
        self._port = port
        # A node refuses a name that is still connected, and learns a moment late that a call ended.
        # With erl_call's own `-r` the calls of one second share one name: two of 1,000 failed.
        self._names = (f"call-{os.getpid()}-{number}" for number in itertools.cycle(range(1000)))

    def eval(self, erlang: str, *, within_s: float = WAIT_S) -> str:
        """The value of an expression, as Erlang writes it."""
        return self._say("~0tp", erlang, within_s)

    def json(self, erlang: str) -> Any:
        """The value of an expression that JSON can tell."""
        return json.loads(self._say("~ts", f"rabbit_json:encode(begin {erlang} end)"))

    def _say(self, form: str, erlang: str, within_s: float = WAIT_S) -> str:
        said = (
            f'try io:format("ok {form}", [begin {erlang} end])'
            ' catch Kind:What:Where -> io:format("~0tp", [{Kind, What, Where}]) end.\n'
        )
        done = subprocess.run(
            [
                *(self._program, "-h", next(self._names)),
                *("-address", f"{HOST}:{self._port}", "-fetch_stdout", "-e"),
            ],
            input=_ascii(said),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={"HOME": str(self._home)},
            timeout=within_s,
            check=False,
        )
        told = done.stdout.decode()
        if not (told.startswith("ok ") and told.endswith("{ok, ok}")):
            raise RuntimeError(f"{erlang}: {told}")
        return told.removeprefix("ok ").removesuffix("{ok, ok}")


def atom(name: str) -> str:
    """As a term."""
    return f"'{name}'"


def binary(text: str) -> str:
    """As a term: what RabbitMQ takes for names."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'<<"{escaped}"/utf8>>'


def _ascii(erlang: str) -> bytes:
    """With other letters written as Erlang's strings may have them."""
    return "".join(c if c.isascii() else f"\\x{{{ord(c):x}}}" for c in erlang).encode()


def resource(vhost: str, kind: str, name: str) -> str:
    """The node's name of a queue or exchange."""
    return f"rabbit_misc:r({binary(vhost)}, {kind}, {binary(name)})"
