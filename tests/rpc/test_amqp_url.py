"""What a broker's URL may say, and what is refused without showing a secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from gracekit.errors import ConfigError
from gracekit.rpc.amqp.url import Broker, read_url


def read(url: str, *, exchange: str = "gracekit", profile: str = "durable") -> Broker:
    return read_url(url, exchange=exchange, profile=profile)


def test_several_hosts_share_the_first_login_unless_they_have_their_own():
    """
    Hosts come in the order of the URL; a login is good for those after it too.
    """
    broker = read("amqp://me:pass%40word@one,two:5673,you:other@[::1]:5674/v%2Fhost")

    assert [str(host) for host in broker.hosts] == ["one:5672", "two:5673", "[::1]:5674"]
    assert [(host.user, host.password) for host in broker.hosts] == [
        ("me", "pass@word"),
        ("me", "pass@word"),
        ("you", "other"),
    ]
    assert broker.vhost == "v/host"


@pytest.mark.parametrize("path", ["", "/", "//", "/%2F"])
def test_no_vhost_means_the_one_called_slash(path):
    """
    RabbitMQ's URLs, oslo's and everybody's habits agree on that one.
    """
    assert read(f"amqp://localhost{path}").vhost == "/"


def test_options_of_the_url_go_before_the_settings():
    """
    A client that is built from a URL alone can say everything there.
    """
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
    """
    A URL that an OpenStack site has in its configuration is taken as it is.
    """
    assert read(f"rabbit://u:p@host:5672/v?{query}").profile.name == profile


def test_tls_checks_the_broker_unless_that_is_switched_off_in_words():
    """
    `amqps://` verifies chain and host name without being asked.
    """
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
        ("amqp://u:secret@host?exchange=" + "x" * 128, "must have 1 to 127 bytes"),
        ("amqp://u:secret@host?profle=quorum", "unknown option 'profle'; did you mean profile"),
        ("amqp://u:secret@host?profile=quorm", "did you mean quorum"),
        ("amqp://u:secret@host?amqp_durable_queues=true", "unknown option 'amqp_durable_queues'"),
        ("rabbit://u:secret@host?amqp_durable_queues=maybe", "neither true nor false"),
        ("rabbit://u:secret@host?amqp_durable_queues=1&profile=quorum", "leave out one"),
        ("rabbit://u:secret@host?rabbit_transient_quorum_queue=1", "has no profile here"),
        ("amqp://u:secret@host:port", "a port is no number"),
        ("amqp://u:secret@host:70000", "a port is no number"),
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
    """
    The error shows the URL, but for its login, and what to write instead.
    """
    with pytest.raises(ConfigError, match=said) as refused:
        read(url)

    assert "secret" not in str(refused.value)


def test_a_login_is_in_no_repr():
    """
    A broker may stand in a traceback or a debugger.
    """
    broker = read("amqp://somebody:secret@host")

    assert "secret" not in repr(broker) + str(broker)
    assert "somebody" not in repr(broker)


def test_a_missing_certificate_is_told_by_its_name(tmp_path: Path):
    """
    The file that cannot be used is in the error.
    """
    tls = read(f"amqps://u:p@host?cafile={tmp_path}/none.pem").tls
    assert tls is not None

    with pytest.raises(ConfigError, match=r"cannot use the certificates in .*none\.pem"):
        tls.context()
