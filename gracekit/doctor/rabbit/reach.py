"""Checks of the connection to a broker: TLS, the user, and whether it accepts the login."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gracekit.doctor.finding import Finding, fail, ok, told, warn
from gracekit.doctor.rabbit.broker import Node
from gracekit.errors import ConfigError, GracekitError
from gracekit.exits import ExitCode
from gracekit.rpc.amqp.url import TLS_PORT, Broker, is_loopback

UNREACHABLE: Final = (
    "see that the broker runs there and that host, port and firewall are right; a TLS port "
    f"({TLS_PORT} by default) wants amqps://"
)
MEND: Final = "mend GRACEKIT_TRANSPORT_URL"


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
