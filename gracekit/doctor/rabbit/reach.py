"""Checks of a broker: TLS, the user, whether it accepts the login, and its policies."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from gracekit.doctor.finding import Finding, fail, ok, skip, told, warn
from gracekit.doctor.rabbit.broker import Node
from gracekit.errors import ConfigError, GracekitError
from gracekit.exits import ExitCode
from gracekit.rpc.amqp.url import TLS_PORT, Broker, is_loopback

UNREACHABLE: Final = (
    "see that the broker runs there and that host, port and firewall are right; a TLS port "
    f"({TLS_PORT} by default) wants amqps://"
)
MEND: Final = "mend GRACEKIT_TRANSPORT_URL"
CONTROL_S: Final = 20.0
"""Seconds that `rabbitmqctl` has to answer."""
_LIMITS: Final = frozenset({"expires", "message-ttl", "max-length", "max-length-bytes"})


def check_tls(broker: Broker) -> Finding:
    """Check that the connection cannot be read by others, and that the broker is authenticated."""
    tls = broker.tls
    if tls is None:
        remote = [str(host) for host in broker.hosts if not is_loopback(host.host)]
        if not remote:
            return ok("TLS", "none, and none is needed on this machine")
        return warn(
            "TLS",
            f"none to {', '.join(remote)}: others on the network can read password and requests",
            f"write amqps:// (port {TLS_PORT} by default), and cafile= for your own authority",
        )
    if not tls.verify:
        return warn(
            "TLS",
            "verify=none: others on the network can pass for the broker, and get the password",
            "leave verify= out, and write cafile= for your own authority",
        )
    return ok("TLS", f"certificate and host name are checked against {tls.cafile or 'the system'}")


def check_guest(broker: Broker) -> Iterator[Finding]:
    """Warn about user guest; on other machines than the broker's the URL is refused anyway."""
    if any(host.user == "guest" for host in broker.hosts):
        yield warn(
            "guest",
            "user guest is an administrator, and with its usual password everybody's",
            "make a user of its own (rabbitmqctl add_user, set_permissions), and delete guest",
        )


def check_node(node: Node, *, others: bool) -> Iterator[Finding]:
    """Check that *node* accepts the login; only a warning if *others* do."""
    check = f"broker {node.host}"
    if node.error is None:
        yield ok(check, "it lets us in")
        return
    for one in told_with(check, node.error):
        yield warn(one.check, f"{one.seen}; another host answers", one.remedy) if others else one


def told_with(check: str, error: GracekitError) -> Iterator[Finding]:
    """One FAIL for each line of *error*, each with a remedy."""
    wrong = isinstance(error, ConfigError)
    code = ExitCode.CONFIG if wrong else ExitCode.DEPENDENCY
    for one in told(check, error, code):
        yield fail(check, one.seen, one.remedy or (MEND if wrong else UNREACHABLE), code)


def check_policies(broker: Broker, names: Sequence[str]) -> Iterator[Finding]:
    """Check for policies that expire or limit the queues *names*; AMQP does not report them."""
    ask = ["rabbitmqctl", "-q", "--formatter", "json", "list_policies", "-p", broker.vhost]
    try:
        here = ("localhost", "127.0.0.1", "::1", socket.gethostname())
        if not any(one.host in here for one in broker.hosts):
            raise OSError("the broker is on another host")  # noqa: TRY301 - one way out
        env = os.environ | {"ERL_FLAGS": "-start_epmd false"}  # it would leave that daemon behind
        done = subprocess.run(ask, env=env, capture_output=True, timeout=CONTROL_S, check=True)  # noqa: S603 - no shell
        policies: list[dict[str, Any]] = msgspec.json.decode(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        look = (
            f"look on its host, as root: rabbitmqctl list_policies -p {shlex.quote(broker.vhost)}"
        )
        yield skip("policies", f"AMQP does not report them, nor rabbitmqctl here: {error}", look)
        return
    policies.sort(key=lambda one: one["priority"], reverse=True)  # the first that fits counts
    for name in names:
        fits = (one for one in policies if re.search(one["pattern"], name))
        policy = next((one for one in fits if one["apply-to"] != "exchanges"), {"definition": "{}"})
        if limits := _LIMITS & msgspec.json.decode(policy["definition"]).keys():
            yield warn(
                "policies",
                f"policy {policy['name']!r} sets {', '.join(sorted(limits))} for queue {name}: the "
                "broker deletes or refuses requests",
                "let its pattern leave out the service's queues (docs/rabbitmq.md, Policies)",
            )
