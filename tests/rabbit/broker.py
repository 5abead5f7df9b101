"""A RabbitMQ node of the tests' own: started, killed, frozen, looked into, and gone afterwards.

All of it is private and on loopback: name, cookie, epmd, ports, data. Methods block; a client on
the same event loop lives on meanwhile if they run in `asyncio.to_thread`.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import os
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.rabbit.erlang import Epmd, ErlCall, atom, binary, find_server, resource
from tests.rabbit.machine import (
    HOST,
    WAIT_S,
    Guard,
    descendants,
    free_ports,
    process,
    see_off,
    wait_until,
)

USER: Final = "tests"

_AMQP: Final = b"AMQP\x00\x00\x09\x01"
_CONNECTION_START: Final = b"\x00\x0a\x00\x0a"

_CONSUMER_TIMEOUT_MS: Final = 1_800_000  # RabbitMQ's own
_CHANNEL_TICK_MS: Final = 60_000  # the same

_VHOSTS: Final = itertools.count()

# A classic queue's process counts for itself. A quorum queue tells only now and then, so its
# leader is asked; and it takes who has gotten a message for a consumer, one of unknown ack mode.
# A queue that is deleted meanwhile is none.
_QUEUES: Final = """
lists:append([try
  {resource, _, queue, Name} = amqqueue:get_name(Q),
  {Ready, Unacked} = case amqqueue:get_type(Q) of
    rabbit_quorum_queue ->
      list_to_tuple([begin
        {ok, Count, _} = ra:consistent_query(amqqueue:get_pid(Q), F),
        Count
      end || F <- [fun rabbit_fifo:query_messages_ready/1,
        fun rabbit_fifo:query_messages_checked_out/1]]);
    _ ->
      list_to_tuple([Count || {_, Count} <-
        rabbit_amqqueue:info(Q, [messages_ready, messages_unacknowledged])])
  end,
  Consumers = [C || C <- rabbit_amqqueue:consumers(Q), is_boolean(element(3, C))],
  [_, Type, _] = string:lexemes(atom_to_list(amqqueue:get_type(Q)), "_"),
  [#{name => Name, ready => Ready, unacked => Unacked, consumers => length(Consumers),
    durable => amqqueue:is_durable(Q), type => list_to_binary(Type),
    arguments => rabbit_misc:amqp_table(amqqueue:get_arguments(Q))}]
catch Kind:Why:Where ->
  case rabbit_amqqueue:lookup(amqqueue:get_name(Q)) of
    {error, not_found} -> [];
    _ -> erlang:raise(Kind, Why, Where)
  end
end || Q <- rabbit_amqqueue:list(VHOST)])
"""

# In the queue's own process, which alone may look, and sees what a client holds too.
_BODIES: Final = """
maps:from_list(lists:append([begin
  {resource, _, queue, Name} = amqqueue:get_name(Q),
  Watched = monitor(process, amqqueue:get_pid(Q)),
  Asking = {self(), make_ref()},
  Look = fun(Kind, Queue) ->
    {Found, After} = Kind:fold(fun({basic_message, _, _, Content, _, _}, _, _, Sofar) ->
      {_, Body} = rabbit_basic:from_content(Content),
      {cont, [base64:encode(Body) | Sofar]}
    end, [], Queue),
    {Who, Ref} = Asking,
    Who ! {Ref, lists:reverse(Found)},
    After
  end,
  ok = rabbit_amqqueue:run_backing_queue(amqqueue:get_pid(Q), rabbit_variable_queue, Look),
  {_, Asked} = Asking,
  receive
    {Asked, Bodies} -> demonitor(Watched, [flush]), [{Name, Bodies}];
    {'DOWN', Watched, process, _, _} -> []
  after 10000 -> exit({no_answer, Name}) end
end || Q <- rabbit_amqqueue:list(VHOST), amqqueue:get_type(Q) =:= rabbit_classic_queue]))
"""


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue as the node sees it now."""

    ready: int
    unacked: int
    consumers: int
    durable: bool
    type: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Tls:
    """What a node shows to its clients: paths of PEM files."""

    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Membership:
    """What a node of a cluster shares with the others.

    Attributes:
        name: Its own.
        names: Of all nodes.
    """

    name: str
    names: Sequence[str]
    epmd: Epmd
    cookie: str
    password: str


class Broker:
    """One RabbitMQ node.

    Args:
        directory: Its home, configuration, data and logs; made if missing.
        tls: Serve amqps with it too, on a port of its own.
        member: Be one of a cluster, which closes the epmd that they share.
        settings: More of the application `rabbit`, as Erlang terms by name.
        schedulers: Threads that run Erlang; RabbitMQ itself takes one for each processor.
    """

    def __init__(
        self,
        directory: Path,
        *,
        tls: Tls | None = None,
        member: Membership | None = None,
        settings: Mapping[str, str] | None = None,
        schedulers: int = 1,
    ) -> None:
        self._directory = directory
        self._schedulers = schedulers
        self._server = find_server()
        self._member = member
        self._epmd: Epmd | None = member.epmd if member else None
        self.port, self.tls_port, self.distribution_port = free_ports(3)
        self._erlang = ErlCall(directory, self.distribution_port)
        self.name = member.name if member else "rabbit@localhost"
        self.password = member.password if member else secrets.token_urlsafe(12)
        self._tls = tls
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: Guard | None = None
        self._frozen = False
        self._write_files(settings or {})

    # -- life ----------------------------------------------------------------------

    def start(self) -> None:
        """Start on the data that it left, and wait until it takes connections."""
        self.launch()
        self.await_serving()

    def launch(self) -> None:
        """Start, and do not wait."""
        assert self._process is None, "it is running"
        if self._epmd is None:
            self._epmd = Epmd()
        if self._guard is None:
            self._guard = Guard()
        with self._output.open("ab") as out:
            self._process = subprocess.Popen(
                [self._server],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=self._directory,
                env=self._environment(self._epmd),
                start_new_session=True,
            )
        self._guard.watch(self._process.pid)

    def await_serving(self) -> None:
        """Wait until it takes connections."""
        node = self._process
        assert node is not None, "it was not launched"
        try:
            wait_until(lambda: node.poll() is not None or _speaks_amqp(self.port), "AMQP")
            assert node.poll() is None, f"RabbitMQ ended {node.returncode}"
        except AssertionError as error:
            self.kill()
            raise AssertionError(f"{error}\n{self.log[-3000:]}") from None
        became = Path(f"/proc/{self.pid}/comm").read_text()
        assert became.startswith("beam"), f"{self._server} does not become the node"
        # Until the boot has ended too, `rabbit:start()` says ok and does nothing.
        wait_until(lambda: self.eval("whereis(rabbit_boot)") == "undefined", "the boot's end")

    def kill(self) -> None:
        """As a crash: no farewell, and the data as they are. Returns when it is dead."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """As a system does it: by TERM. Returns when it has ended."""
        self.thaw()
        self._end(signal.SIGTERM)

    def restart_gently(self) -> None:
        """As after a change of configuration: clients are told, and the process stays."""
        self.eval("ok = rabbit:stop(), ok = rabbit:start()")
        self.await_serving()

    def close(self) -> None:
        """Leave nothing behind but files."""
        self.kill()
        if self._epmd is not None and self._member is None:
            self._epmd.close()
            self._epmd = None
        if self._guard is not None:
            self._guard.close()
            self._guard = None

    def _end(self, number: signal.Signals) -> None:
        if (node := self._process) is None:
            return
        children = descendants(node.pid) if self.running else []
        node.send_signal(number)
        try:
            node.wait(WAIT_S)
        finally:
            node.kill()
            node.wait()
            self._process = None
            self._frozen = False
            assert self._guard is not None
            self._guard.watch()
            see_off(children)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Of the node itself, which the start script becomes."""
        assert self._process is not None, "it is not running"
        return self._process.pid

    @property
    def pids(self) -> list[int]:
        """Of all that was started for it and is to be gone afterwards."""
        found = [self._guard.pid] if self._guard else []
        if self._epmd is not None:
            found += self._epmd.pids
        if self.running:
            found += [self.pid, *(child.pid for child in descendants(self.pid))]
        return found

    # -- faults --------------------------------------------------------------------

    def freeze(self) -> None:
        """Stop its time; connections stay open and nobody answers."""
        assert self._process is not None, "it is not running"
        self._process.send_signal(signal.SIGSTOP)
        self._frozen = True
        wait_until(lambda: process(self.pid).state == "T", "the node frozen")

    def thaw(self) -> None:
        """Let it go on."""
        if self._frozen and self._process is not None:
            self._process.send_signal(signal.SIGCONT)
        self._frozen = False

    def set_alarm(self) -> None:
        """Out of memory, it says: who publishes is blocked."""
        self.eval("rabbit_alarm:set_alarm({{resource_limit, memory, node()}, []})")

    def clear_alarm(self) -> None:
        self.eval("rabbit_alarm:clear_alarm({resource_limit, memory, node()})")

    def close_all_connections(self, reason: str = "by the test") -> None:
        """Close them from the node's side, as an operator does."""
        self.eval(
            f"[rabbit_networking:close_connection(Pid, {binary(reason)})"
            " || Pid <- rabbit_networking:local_connections()]"
        )

    def delete_queue(self, name: str, vhost: str = "/") -> int:
        """Delete it with all that it holds and all its consumers; returns how many were ready."""
        ready = self.eval(
            f"{{ok, Q}} = rabbit_amqqueue:lookup({resource(vhost, 'queue', name)}),"
            f" {{ok, Ready}} = rabbit_amqqueue:delete(Q, false, false, {binary(USER)}), Ready"
        )
        return int(ready)

    def consumer_timeout(self, ms: int | None) -> None:
        """How long a delivery may stay unacked on channels opened from now on; None for the usual.

        Channels look for it once in a minute; with a timeout of a test they look each half second.
        """
        tick_ms = _CHANNEL_TICK_MS if ms is None else 500
        self.eval(
            f"application:set_env(rabbit, consumer_timeout, {ms or _CONSUMER_TIMEOUT_MS}),"
            f" application:set_env(rabbit, channel_tick_interval, {tick_ms})"
        )

    def settle(self) -> None:
        """Write down what queues there are.

        For the first second or two a quorum queue is lost with its node, whatever was confirmed:
        its name is in a table that is not written at once.
        """
        self.eval("[ok = dets:sync(Table) || Table <- dets:all()]")

    def heal(self) -> None:
        """Undo all faults and delete all virtual hosts, so that the next test has a fresh node."""
        self.thaw()
        if not (self.running and _speaks_amqp(self.port)):
            self.kill()
            self.start()
        for vhost in self._erlang.json("rabbit_vhost:list_names()"):
            if vhost != "/":
                self.delete_vhost(vhost)
        self.clear_alarm()
        self.consumer_timeout(None)
        if self._tls is not None:
            self.show(self._tls)

    def show(self, tls: Tls) -> None:
        """Show another certificate to who connects from now on."""
        self._put_certificate(tls)
        self.eval("ssl:clear_pem_cache()")

    # -- looking -------------------------------------------------------------------

    def eval(self, erlang: str, *, within_s: float = WAIT_S) -> str:
        """The value of an Erlang expression in the node, as Erlang writes it."""
        return self._erlang.eval(erlang, within_s=within_s)

    def queues(self, vhost: str = "/") -> dict[str, Queue]:
        """Its queues, counted exactly."""
        rows = self._erlang.json(_QUEUES.replace("VHOST", binary(vhost)))
        return {row.pop("name"): Queue(**row) for row in rows}

    def bodies(self, vhost: str = "/") -> dict[str, list[bytes]]:
        """What classic queues hold, oldest first, whether it waits or a client has it unacked.

        Unlike a get it takes nothing, so nothing is marked as redelivered.
        """
        rows = self._erlang.json(_BODIES.replace("VHOST", binary(vhost)))
        return {name: list(map(base64.b64decode, bodies)) for name, bodies in rows.items()}

    def home_of(self, queue: str, vhost: str = "/") -> str:
        """The name of the node that leads a quorum queue, or holds a classic one."""
        return self.eval(
            f"{{ok, Q}} = rabbit_amqqueue:lookup({resource(vhost, 'queue', queue)}),"
            " case amqqueue:get_pid(Q) of {_, Node} -> Node; Pid -> node(Pid) end"
        ).strip("'")

    def connections(self) -> int:
        """How many clients are connected."""
        return int(self.eval("length(rabbit_networking:local_connections())"))

    @property
    def log(self) -> str:
        """All that it wrote."""
        logs = [self._output, *sorted(self._directory.glob("log/*.log"))]
        return "".join(path.read_text(errors="replace") for path in logs if path.exists())

    # -- virtual hosts -------------------------------------------------------------

    @property
    def url(self) -> str:
        return self.url_of("")

    def url_of(self, vhost: str, *, port: int | None = None) -> str:
        """Where a client finds *vhost*; through another *port*, say a proxy's."""
        return f"amqp://{USER}:{self.password}@{HOST}:{port or self.port}/{vhost}"

    def tls_url_of(self, vhost: str, *, host: str = "localhost") -> str:
        return f"amqps://{USER}:{self.password}@{host}:{self.tls_port}/{vhost}"

    def add_vhost(self, name: str) -> None:
        everything = ", ".join([binary(".*")] * 3)
        user = binary(USER)
        self.eval(
            f"ok = rabbit_vhost:add({binary(name)}, {user}),"
            " ok = rabbit_auth_backend_internal:set_permissions("
            f"{user}, {binary(name)}, {everything}, {user})"
        )

    def fresh_vhost(self) -> str:
        """The name of a virtual host that nobody has used."""
        name = f"test-{next(_VHOSTS)}"
        self.add_vhost(name)
        return name

    def delete_vhost(self, name: str) -> None:
        """Delete it with all that is in it; its connections are closed."""
        delete = f"ok = rabbit_vhost:delete({binary(name)}, {binary(USER)})"
        self.eval(delete, within_s=300)  # with all of its messages

    # -- files ---------------------------------------------------------------------

    @property
    def _output(self) -> Path:
        return self._directory / "output"

    def _write_files(self, settings: Mapping[str, str]) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        cookie = self._directory / ".erlang.cookie"
        cookie.touch(0o600)
        cookie.write_text(self._member.cookie if self._member else secrets.token_hex(16))
        (self._directory / "enabled_plugins").write_text("[].\n")
        (self._directory / "env.conf").touch()  # instead of the machine's
        names = self._member.names if self._member else [self.name]
        rabbit = {
            "tcp_listeners": f'[{{"{HOST}", {self.port}}}]',
            "default_user": binary(USER),
            "default_pass": binary(self.password),
            "loopback_users": "[]",
            "disk_free_limit": "0",
            "cluster_nodes": f"{{[{', '.join(map(atom, names))}], disc}}",
            **self._tls_settings(),
            **settings,
        }
        terms = ",\n  ".join(f"{{{name}, {term}}}" for name, term in rabbit.items())
        config = self._directory / "rabbitmq.config"
        config.touch(0o600)
        config.write_text(f"[{{rabbit, [\n  {terms}\n]}}].\n")

    def _without_plugins(self) -> dict[str, str]:
        """None is enabled, yet a node reads all that it sees: a fifth of its time to start."""
        seen = self._directory / "plugins"
        seen.mkdir(exist_ok=True)
        cores = Path(self._server).resolve().parents[1].glob("plugins/rabbit-*")
        for core in cores:  # with the schema of its configuration in it
            with contextlib.suppress(FileExistsError):
                (seen / core.name).symlink_to(core)
        return {"RABBITMQ_PLUGINS_DIR": str(seen)} if any(seen.iterdir()) else {}

    def _tls_settings(self) -> dict[str, str]:
        if self._tls is None:
            return {}
        self._put_certificate(self._tls)
        certificate, key = self._shown
        return {
            "ssl_listeners": f'[{{"{HOST}", {self.tls_port}}}]',
            "ssl_options": f'[{{certfile, "{certificate}"}}, {{keyfile, "{key}"}}]',
        }

    @property
    def _shown(self) -> tuple[Path, Path]:
        return self._directory / "certificate.pem", self._directory / "key.pem"

    def _put_certificate(self, tls: Tls) -> None:
        for source, target in zip((tls.certificate, tls.key), self._shown, strict=True):
            shutil.copy(source, target)

    def _environment(self, epmd: Epmd) -> dict[str, str]:
        port = self.distribution_port
        flags = (
            # Named from the start, it does not look for an epmd of the system.
            f"-sname {self.name} -start_epmd false",
            "-kernel inet_dist_use_interface {127,0,0,1}",
            f"-kernel inet_dist_listen_min {port} -kernel inet_dist_listen_max {port}",
            f"+S {self._schedulers}:{self._schedulers}",
        )
        return (
            epmd.environment
            | self._without_plugins()
            | {
                "PATH": os.environ["PATH"],
                "LANG": "C.UTF-8",
                "HOME": str(self._directory),
                "ERL_CRASH_DUMP_SECONDS": "0",
                "RUNNING_UNDER_SYSTEMD": "true",  # the start script becomes the node
                "RABBITMQ_SCHEDULER_BIND_TYPE": "u",  # else all nodes sit on the same core
                "RABBITMQ_CONF_ENV_FILE": str(self._directory / "env.conf"),
                "RABBITMQ_CONFIG_FILE": str(self._directory / "rabbitmq.config"),
                "RABBITMQ_ENABLED_PLUGINS_FILE": str(self._directory / "enabled_plugins"),
                "RABBITMQ_MNESIA_BASE": str(self._directory / "data"),
                "RABBITMQ_LOG_BASE": str(self._directory / "log"),
                "RABBITMQ_NODENAME": self.name,
                "RABBITMQ_DIST_PORT": str(port),
                "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": " ".join(flags),
            }
        )


def _speaks_amqp(port: int) -> bool:
    """Whether the node begins the handshake."""
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=5) as trial:
        trial.sendall(_AMQP)
        return trial.recv(11)[7:] == _CONNECTION_START
    return False
