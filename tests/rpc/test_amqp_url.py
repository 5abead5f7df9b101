"""What a broker's URL may say, and what is refused without showing a secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from gracekit.errors import ConfigError
from gracekit.rpc.amqp.url import Broker, read_url


def read(url: str, *, exchange: str = "gracekit", profile: str = "durable") -> Broker:
    return read_url(url, exchange=exchange, profile=profile)


def test_several_hosts_share_the_first_login_unless_they_have_their_own():
    """Hosts come in the order of the URL; a login is good for those after it too."""
    broker = read("amqp://me:pass%40word@one,two:5673,you:other@[::1]:5674/v%2Fhost")

    assert [str(host) for host in broker.hosts] == ["one:5672", "two:5673", "[::1]:5674"]
    assert [(host.user, host.password) for host in broker.hosts] == [
        ("me", "pass@word"),
        ("me", "pass@word"),
        ("you", "other"),
    ]
    assert broker.vhost == "v/host"


@pytest.mark.parametrize(
    "host", ["one", "a_b.c-d.", "10.0.0.1", "[::1]", "bücher.example", "x" * 63, "x." * 126 + "x"]
)
def test_a_host_is_a_name_or_an_address(host):
    """As resolvers take them, and containers are named."""
    assert read(f"amqp://u:p@{host}:5673/").hosts[0].port == 5673


@pytest.mark.parametrize("path", ["", "/", "//", "/%2F"])
def test_no_vhost_means_the_one_called_slash(path):
    """RabbitMQ's URLs, oslo's and everybody's habits agree on that one."""
    assert read(f"amqp://localhost{path}").vhost == "/"


def test_options_of_the_url_go_before_the_settings():
    """A client that is built from a URL alone can say everything there."""
    plain = read("amqp://localhost", exchange="openstack", profile="quorum")
    said = read(
        "amqp://localhost?exchange=nova&profile=oslo-durable&heartbeat=4&publish_timeout=5s"
    )

    assert (plain.exchange, plain.profile.name) == ("openstack", "quorum")
    assert (said.exchange, said.profile.name) == ("nova", "oslo-durable")
    assert (said.heartbeat_s, said.publish_timeout_s) == (4.0, 5.0)


@pytest.mark.parametrize(
    ("query", "profile"),
    [
        ("amqp_durable_queues=true", "oslo-durable"),
        ("amqp_durable_queues=false", "oslo-transient"),
        ("amqp_durable_queues=1&rabbit_transient_quorum_queue=1", "oslo-durable-all"),
        ("rabbit_quorum_queue=true", "oslo-quorum"),
        ("rabbit_quorum_queue=true&rabbit_transient_quorum_queue=1", "oslo-quorum-all"),
        ("ssl=false", "durable"),
    ],
)
def test_oslo_s_own_options_choose_its_profiles(query, profile):
    """A URL that an OpenStack site has in its configuration is taken as it is."""
    assert read(f"rabbit://u:p@host:5672/v?{query}").profile.name == profile


def test_tls_checks_the_broker_unless_that_is_switched_off_in_words():
    """`amqps://` verifies chain and host name without being asked."""
    checked = read("amqps://u:p@host")
    unchecked = read("amqps://u:p@host?verify=none")
    oslo = read("rabbit://u:p@host?ssl=true")

    assert checked.tls is not None
    assert checked.hosts[0].port == 5671
    assert checked.tls.context().check_hostname
    assert oslo.tls == checked.tls
    assert unchecked.tls is not None
    assert not unchecked.tls.context().check_hostname
    assert read("amqp://u:p@host").tls is None


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("amqp://u:secret\uff1fx@host/", "is no URL: in users and passwords write"),
        ("amqp://u:1?secret@host/", "an @ stands behind the host"),
        ("amqp://u:secret[abc]w@host/", "is no URL|a port is no number"),
        ("amqp://u:secret@host?exchange=" + "x" * 128, "must be 1 to 127 of A-Z"),
        ("amqp://u:secret@host?exchange=nova%0A", "exchange= must be 1 to 127 of"),
        ("amqp://u:secret@host?exchange=caf%C3%A9", "exchange= must be 1 to 127 of"),
        ("amqp://u:secret@a..b", "a host is neither an address nor a name"),
        ("amqp://u:secret@.a", "a host is neither an address nor a name"),
        ("amqp://u:secret@" + "x" * 64, "with 1 to 63 between two dots"),
        ("amqp://u:secret@" + "é" * 60, "with 1 to 63 between two dots"),
        ("amqp://u:secret@" + "x." * 127 + "x", "of at most 253 letters"),
        ("amqp://u:secret@one,ho st", "a host is neither an address nor a name"),
        ("amqp://u:secret@ho%20st", "a host is neither an address nor a name"),
        ("amqp://u:secret@a\\b", "a host is neither an address nor a name"),
        ("amqp://u:secret@[::zz]", "is no URL"),
        ("amqp://u:secret@host/" + "v" * 128, "must have 1 to 127 characters"),
        ("amqp://u:secret@host/a%252Fb", "vhost 'a%2Fb' must have .* without %2F"),
        ("amqp://u:secret@host/a/../b", "without . or .. alone or between slashes"),
        ("amqp://u:secret@host/..", "without . or .. alone or between slashes"),
        ("amqp://u\udcff:secret@host/v", "is no URL"),
        ("amqp://u:secret@host/v\udcff", "is no URL"),
        ("amqp://u:secret@host?profle=quorum", "unknown option 'profle'; did you mean profile"),
        ("amqp://u:secret@host?profile=quorm", "did you mean quorum"),
        ("amqp://u:secret@host?amqp_durable_queues=true", "unknown option 'amqp_durable_queues'"),
        ("rabbit://u:secret@host?amqp_durable_queues=maybe", "neither true nor false"),
        ("rabbit://u:secret@host?amqp_durable_queues=1&profile=quorum", "leave out one"),
        ("rabbit://u:secret@host?rabbit_transient_quorum_queue=1", "has no profile here"),
        ("amqp://u:secret@host:port", "a port is no number"),
        ("amqp://u:secret@host:70000", "a port is no number"),
        ("amqp://u:secret@host:0", "a port is no number from 1"),
        ("amqp://guest:secret@host", "user guest is for the broker's own machine"),
        ("amqp://u:secret@one,guest:secret@two", "and two is not it"),
        ("amqp://u:secret@host?cafile=ca.pem", "cafile is of no use without TLS: write amqps"),
        ("amqp://u:secret@host?verify=none", "verify is of no use without TLS"),
        ("amqps://u:secret@host?verify=maybe", "neither 'peer' nor 'none'"),
        ("amqp://u:secret@host?heartbeat=0", "heartbeat must be above 0"),
        ("amqp://u:secret@host?heartbeat=2.5", "whole seconds"),
        ("amqp://u:secret@host?publish_timeout=soon", "is not a duration"),
    ],
)
def test_a_wrong_url_is_refused_with_the_remedy_and_no_secret(url, said):
    """The error shows the URL, but for its login, and what to write instead."""
    with pytest.raises(ConfigError, match=said) as refused:
        read(url)

    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "option",
    [
        *("profile", "exchange", "heartbeat", "connect_timeout", "publish_timeout", "verify"),
        *("amqp_durable_queues", "rabbit_quorum_queue", "ssl", "password"),
        "heartbeat_timeout_threshold",
    ],
)
def test_a_wrong_option_is_named_without_its_value(option):
    """It may be the end of a password with a ? or & that nobody has escaped."""
    with pytest.raises(ConfigError, match=option) as refused:
        read(f"rabbit://u:p@host/v?{option}=canary%0A")

    assert "canary" not in str(refused.value)


@pytest.mark.parametrize(
    "login", ["", ":", "somebody", "somebody:", ":secret", "u:secret@one,", "u:secret@one,:"]
)
def test_a_login_that_is_not_whole_is_refused(login):
    """The client below takes guest for what is empty: whoever forgot a variable would log in as
    that.
    """
    with pytest.raises(ConfigError, match="before an @ stand a user and a password") as refused:
        read(f"amqp://{login}@localhost/")

    assert "secret" not in str(refused.value)
    assert "somebody" not in str(refused.value)


def test_no_login_at_all_is_guest_of_this_machine():
    """As everywhere with AMQP; guest from afar is refused."""
    (host,) = read("amqp://localhost/").hosts

    assert (host.user, host.password) == ("guest", "guest")
    with pytest.raises(ConfigError, match="user guest is for the broker's own machine"):
        read("amqp://far/")


def test_a_login_is_in_no_repr():
    """A broker may stand in a traceback or a debugger."""
    broker = read("amqp://somebody:secret@host")

    assert "secret" not in repr(broker) + str(broker)
    assert "somebody" not in repr(broker)


def test_a_missing_certificate_is_told_by_its_name(tmp_path: Path):
    """The file that cannot be used is in the error."""
    tls = read(f"amqps://u:p@host?cafile={tmp_path}/none.pem").tls
    assert tls is not None

    with pytest.raises(ConfigError, match=r"cannot use the certificates in .*none\.pem"):
        tls.context()
