"""What doctor finds on a real RabbitMQ: who lets us in, what fits, who reads, what is dead."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiormq
import pytest
from aiormq.channel import Channel

from gracekit import Context, Runtime, Service, Settings
from gracekit.clock import Clock
from gracekit.config.loading import load
from gracekit.doctor import rabbit
from gracekit.doctor.examine import Examination, examine
from gracekit.doctor.finding import Finding, Level
from gracekit.doctor.rabbit import BrokerChecks, ConnectionChecks
from gracekit.doctor.rabbit_broker import BrokerInspector, BrokerReport, Node, inquire
from gracekit.doctor.rabbit_entities import BrokerAnswer, BrokerEntity, Fit, Topic, entities_of
from gracekit.doctor.store_runs import Runs
from gracekit.errors import ConfigError, DependencyError
from gracekit.exits import ExitCode
from gracekit.process import Process
from gracekit.rpc.amqp.amqp_transport import AmqpTransport
from gracekit.rpc.amqp.link import Link
from gracekit.rpc.amqp.profiles import PROFILES
from gracekit.rpc.amqp.url import Broker as Address
from gracekit.rpc.amqp.url import read_url
from gracekit.rpc.transport import directed_queue, shared_queue
from gracekit.telemetry.telemetry import Telemetry
from tests.cli.kit import gracekit
from tests.doctor.kit import levels, one
from tests.rabbit.broker import Broker, Tls, free_ports
from tests.rpc.kit import Inbox, message

NOBODY = Runs(living=(), doubtful=(), all=())
TOPICS = (Topic(name="compute", hosts=["node-1"]), Topic(name="compute-ops", hosts=["node-1"]))


@pytest.fixture
def svc() -> Service:
    made = Service("compute")

    @made.rpc
    async def create(ctx: Context, vm: str) -> str:
        return vm

    return made


@pytest.fixture
def settings(tmp_path: Path, rabbit_url: str) -> Settings:
    return settings_on(rabbit_url, tmp_path)


def settings_on(url: str, place: Path, store: str = "store", **more: object) -> Settings:
    place.chmod(0o700)
    return Settings(
        transport_url=url,
        store_url=f"sqlite:///{place}/{store}.db",
        host="node-1",
        **more,  # type: ignore[arg-type]
    )


def visited(settings: Settings, service: Service | None) -> list[Finding]:
    """What doctor says of the transport."""
    found = examine(Examination(settings=settings, service=service))
    return [finding for finding in found if finding.area == "transport"]


async def seen(settings: Settings, service: Service | None) -> list[Finding]:
    return await asyncio.to_thread(visited, settings, service)


def address_of(url: str, profile: str = "durable") -> Address:
    return read_url(url, exchange="gracekit", profile=profile)


@asynccontextmanager
async def transport_to(url: str, profile: str = "durable") -> AsyncIterator[AmqpTransport]:
    """A peer that declares as *profile* says."""
    transport = AmqpTransport(
        address_of(url, profile), process=Process(), clock=Clock(), telemetry=Telemetry()
    )
    await transport.start()
    try:
        yield transport
    finally:
        await transport.stop()


@asynccontextmanager
async def channel_to(url: str) -> AsyncIterator[aiormq.abc.AbstractChannel]:
    """A peer that declares as it likes."""
    async with aiormq.Connection(url) as connection:
        yield await connection.channel()


@asynccontextmanager
async def desk_at(address: Address) -> AsyncIterator[BrokerInspector]:
    link = Link(address, purpose="look", label="test", clock=Clock(), telemetry=Telemetry())
    await link.start()
    try:
        yield BrokerInspector(link, address)
    finally:
        await link.stop()


def everything(broker: Broker, vhost: str) -> str:
    """Queues, exchanges and bindings of *vhost*, as the node lists them."""
    name = f'<<"{vhost}">>'
    return broker.eval(
        f"{{lists:sort([amqqueue:get_name(Q) || Q <- rabbit_amqqueue:list({name})]),"
        f" lists:sort(rabbit_exchange:list({name})), lists:sort(rabbit_binding:list({name}))}}"
    )


# -- profiles -----------------------------------------------------------------------


@pytest.mark.parametrize("profile", PROFILES)
async def test_doctor_names_the_one_profile_that_a_living_service_declares(profile, settings, svc):
    """Before the 406 does: the service's own profile is ok, and any other is told which it is."""
    names = list(PROFILES)
    other = names[names.index(profile) - 1]

    async with Runtime(svc, replace(settings, declare_profile=profile)):
        same = await seen(replace(settings, declare_profile=profile), svc)
        differs = await seen(replace(settings, declare_profile=other), svc)

    assert one(same, "profile").level is Level.OK
    found = one(differs, "profile")
    assert found.level is Level.FAIL
    assert f"profile {other} would be refused (406)" in found.seen
    assert found.remedy == f"set GRACEKIT_DECLARE_PROFILE={profile}", "others use what exists"


async def test_doctor_and_a_start_agree_on_each_pair_of_profiles(rabbit_url):
    """Doctor must not be wiser than the broker: it says FAIL exactly where a declare is refused."""
    queues = [shared_queue("compute"), directed_queue("compute", "node-1")]
    things = entities_of(TOPICS[:1], "gracekit", "")
    async with transport_to(rabbit_url, "oslo-durable") as peer:
        await peer.declare(queues)
    agreed: dict[str, bool] = {}
    for profile in PROFILES:
        picture = await inquire(address_of(rabbit_url, profile), things, (), None)
        async with transport_to(rabbit_url, profile) as peer:
            try:
                await peer.declare(queues)
            except Exception:  # noqa: BLE001 - as a start would be refused
                refused = True
            else:
                refused = False
        fits = [answers[profile].fit for answers in picture.fits.values()]
        agreed[profile] = (Fit.DIFFERS in fits) == refused

    assert agreed == dict.fromkeys(PROFILES, True)


async def test_a_profile_in_the_url_is_told_to_be_mended_there(settings, svc, rabbit_url):
    """Where the URL names one, the setting is not looked at."""
    async with transport_to(rabbit_url, "quorum") as peer:
        await peer.declare([shared_queue("compute")])

    for option in ("profile=oslo-durable", "amqp_durable_queues=true"):
        url = f"rabbit{rabbit_url.removeprefix('amqp')}?{option}"
        found = one(await seen(replace(settings, transport_url=url), svc), "profile")
        assert found.remedy.startswith("write profile=quorum into the transport URL")


async def test_what_fits_no_profile_is_told_with_the_nearest(settings, svc, rabbit_url):
    """Leftovers of three kinds of peers: what differs from ours, and what from the nearest
    first.
    """
    async with channel_to(rabbit_url) as channel:
        await channel.exchange_declare("gracekit", exchange_type="topic")
        await channel.queue_declare("compute", durable=True, arguments={"x-max-length": 9})
        await channel.queue_declare("compute.node-1", durable=True)
        await channel.exchange_declare("compute_fanout", exchange_type="direct")

    found = one(await seen(settings, svc), "profile")

    assert found.level is Level.FAIL
    for words in (
        "exchange gracekit has durable = false instead of true",
        "queue compute, queue compute.node-1 have x-dead-letter-exchange = none instead of ''",
        "exchange compute_fanout has type = direct instead of fanout",
        "no profile fits all; nearest is oslo-",
    ):
        assert words in found.seen


async def test_queues_of_the_topic_beside_another_exchange_are_a_warning(settings, svc, rabbit_url):
    """The service would start, and only requests to a queue that it alone has made would be
    lost.
    """
    async with transport_to(rabbit_url) as peer:
        await peer.declare([shared_queue("compute")])

    other = await seen(replace(settings, exchange="cinderish"), svc)
    same = await seen(settings, svc)

    found = one(other, "control exchange")
    assert found.level is Level.WARN
    assert found.seen.startswith("queue compute exists, and exchange cinderish, which the start ")
    assert "set GRACEKIT_EXCHANGE" in found.remedy
    assert "control exchange" not in levels(same)


async def test_a_topic_without_queues_beside_a_known_exchange_is_told(settings, svc, rabbit_url):
    """It is a first start or a wrong topic, which nobody can tell apart but the reader."""
    async with channel_to(rabbit_url) as channel:
        await channel.exchange_declare("gracekit", exchange_type="topic", durable=True)

    before = one(await seen(settings, svc), "profile")
    async with transport_to(rabbit_url) as peer:
        await peer.declare([shared_queue("compute")])
    after = one(await seen(settings, svc), "profile")

    told = "; no queue of topic compute exists yet"
    assert before.level is Level.OK
    assert before.seen == f"durable fits what exists: exchange gracekit{told}"
    assert told not in after.seen


@pytest.mark.parametrize(
    "argument", ["x-delivery-limit", "x-max-in-memory-length", "x-max-in-memory-bytes"]
)
async def test_an_argument_of_oslo_that_no_profile_has_is_named(
    settings, svc, rabbit_url, argument
):
    """Whichever profile was chosen: no other one would help, and the peers' is the quorum one."""
    limited = {"x-queue-type": "quorum", argument: 5}
    async with channel_to(rabbit_url) as channel:
        await channel.exchange_declare("gracekit", exchange_type="topic", durable=True)
        for name in ("compute", "compute.node-1"):
            await channel.queue_declare(name, durable=True, arguments=limited)
    found = [
        one(await seen(replace(settings, declare_profile=profile), svc), "profile")
        for profile in ("durable", "oslo-quorum", "oslo-transient")
    ]

    assert {finding.level for finding in found} == {Level.FAIL}
    named = f"nearest is oslo-quorum-all, but queue compute has {argument} = 5 instead of none"
    assert all(named in finding.seen for finding in found)


async def test_doctor_changes_nothing_on_a_broker(settings, svc, shared_broker, rabbit_vhost):
    """Not where nothing exists, not where half of it does, and not under another profile."""
    empty = everything(shared_broker, rabbit_vhost)
    nothing = await seen(settings, svc)
    after = everything(shared_broker, rabbit_vhost)

    async with transport_to(settings.transport_url, "oslo-quorum") as peer:
        await peer.declare([shared_queue("compute")])
    half = everything(shared_broker, rabbit_vhost)
    for profile in PROFILES:
        await seen(replace(settings, declare_profile=profile), svc)

    assert one(nothing, "profile").seen == "durable; none of its queues and exchanges exists yet"
    assert after == empty
    assert everything(shared_broker, rabbit_vhost) == half != empty


async def test_a_comparison_makes_nothing_where_all_has_gone_meanwhile(
    shared_broker, rabbit_vhost, rabbit_url
):
    """Between the look and the comparison a queue may expire: the guard keeps it from coming
    back.
    """
    before = everything(shared_broker, rabbit_vhost)

    async with desk_at(address_of(rabbit_url)) as desk:
        answers = [
            await desk.compare(thing, thing.flags(profile))
            for profile in PROFILES.values()
            for thing in entities_of(TOPICS, "gracekit", "store")
            if thing.flags(profile) is not None
        ]

    assert {answer.fit for answer in answers} == {Fit.MISSING}
    assert everything(shared_broker, rabbit_vhost) == before


# -- the way in ---------------------------------------------------------------------


def failed(found: Sequence[Finding]) -> Finding:
    """The one FAIL; nothing is judged after it."""
    (finding,) = [finding for finding in found if finding.level is Level.FAIL]
    assert found[-1] == finding
    assert finding.remedy
    return finding


async def test_a_wrong_login_fails_with_its_remedy(settings, svc, shared_broker):
    """As a start would, with 78; neither user nor password is shown."""
    url = settings.transport_url.replace(shared_broker.password, "canary-password")

    found = failed(await seen(replace(settings, transport_url=url), svc))

    assert found.code is ExitCode.CONFIG
    assert found.seen == f"broker 127.0.0.1:{shared_broker.port} refused the login"
    assert "user and password" in found.remedy
    assert "canary" not in f"{found}"


async def test_a_vhost_that_is_missing_or_closed_to_us_fails_with_its_remedy(
    settings, svc, shared_broker
):
    """Both want an operator; the broker's own words tell which it is, without the user."""
    shared_broker.eval('rabbit_vhost:add(<<"not-ours">>, <<"test">>)')
    for vhost, why in (
        ("nowhere", "vhost nowhere not found"),
        ("not-ours", "access to vhost 'not-ours' refused"),
    ):
        url = shared_broker.url_of(vhost)
        found = failed(await seen(replace(settings, transport_url=url), svc))
        assert (found.code, found.seen) == (
            ExitCode.CONFIG,
            f"broker 127.0.0.1:{shared_broker.port} refused vhost '{vhost}': NOT_ALLOWED - {why}",
        )
        assert "rabbitmqctl add_vhost" in found.remedy
    shared_broker.delete_vhost("not-ours")


async def test_a_broker_that_is_not_there_fails_with_host_and_port(settings, svc):
    """A dependency: 69."""
    (port,) = free_ports(1)
    url = f"amqp://user:secret@127.0.0.1:{port}/x"

    found = failed(await seen(replace(settings, transport_url=url), svc))

    assert found.code is ExitCode.DEPENDENCY
    assert f"broker 127.0.0.1:{port} cannot be reached" in found.seen


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"AMQP\0\1\0\0"])
async def test_a_port_that_does_not_speak_amqp_is_named(settings, svc, answer):
    """Such as RabbitMQ's own port for HTTP: the text says what is wrong, not which bytes came."""

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        url = f"amqp://user:secret@127.0.0.1:{port}/x"

        found = failed(await seen(replace(settings, transport_url=url), svc))

    assert found.code is ExitCode.DEPENDENCY
    assert f"what answers at 127.0.0.1:{port} does not speak AMQP" in found.seen


async def test_a_host_that_is_down_beside_one_that_answers_is_a_warning(
    settings, svc, shared_broker, rabbit_vhost
):
    """A cluster lives on, so the rest is judged by the node that answers."""
    (port,) = free_ports(1)
    url = shared_broker.url_of(rabbit_vhost).replace("@127", f"@127.0.0.1:{port},127")

    found = await seen(replace(settings, transport_url=url), svc)

    assert one(found, f"broker 127.0.0.1:{port}").level is Level.WARN
    assert one(found, f"broker 127.0.0.1:{shared_broker.port}").level is Level.OK
    assert one(found, "profile").level is Level.OK


@pytest.mark.parametrize(
    ("url", "check", "level", "said"),
    [
        ("amqp://guest:guest@10.0.0.1/", "URL", Level.FAIL, "rabbitmqctl add_user"),
        ("amqp://a:b@localhost:1/", "TLS", Level.OK, "none is needed"),
        ("amqps://a:b@localhost:1/?verify=none", "TLS", Level.WARN, "verify=none"),
        ("amqps://a:b@localhost:1/", "TLS", Level.OK, "checked against the system"),
        ("amqp://a:b@localhost:1/?profil=quorum", "URL", Level.FAIL, "did you mean profile"),
        ("amqps://a:b@localhost:1/?cafile=/no.pem", "broker localhost:1", Level.FAIL, "/no.pem"),
    ],
)
def test_what_a_url_says_of_safety_is_judged(settings, svc, url, check, level, said):
    """The user that everybody knows elsewhere, and a broker that need not prove who it is."""
    found = one(visited(replace(settings, transport_url=url), svc), check)

    assert found.level is level
    assert said in f"{found.seen} {found.remedy}"
    assert found.remedy or level is Level.OK


def test_a_broker_elsewhere_without_tls_is_a_warning(settings):
    """Judged by the URL alone: this one is not connected to."""
    visit = ConnectionChecks(
        replace(settings, transport_url="amqp://a:b@broker.example/"), NOBODY, None, store=None
    )

    found = one(visit.check_url(), "TLS")

    assert found.level is Level.WARN
    assert "none to broker.example:5672" in found.seen
    assert "amqps://" in found.remedy


def made_by(directory: Path, *arguments: str) -> None:
    """A key and a certificate, by the openssl that RabbitMQ's Erlang needs too."""
    openssl = shutil.which("openssl")
    assert openssl, "install openssl: the test makes certificates with it"
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    subprocess.run(
        [openssl, "req", "-x509", *key, *arguments], cwd=directory, check=True, capture_output=True
    )


@pytest.fixture(scope="module")
def tls_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Broker, Path]]:
    """A broker that proves to be localhost, and the certificate of its authority."""
    place = tmp_path_factory.mktemp("tls")
    made_by(place, "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem")
    made_by(
        place,
        *("-subj", "/CN=broker", "-addext", "subjectAltName=DNS:localhost"),
        *("-CA", "ca.pem", "-CAkey", "ca.key", "-keyout", "key.pem", "-out", "broker.pem"),
    )
    tls = Tls(certificate=place / "broker.pem", key=place / "key.pem")
    broker = Broker(tmp_path_factory.mktemp("rabbit-tls"), tls=tls)
    try:
        broker.start()
        yield broker, place / "ca.pem"
    finally:
        broker.close()


async def test_a_certificate_is_judged_as_a_start_would(settings, svc, tls_broker):
    """Another authority, another name, the wrong port: each is told apart; verify=none is let
    in.
    """
    broker, ca = tls_broker
    good = f"{broker.tls_url_of('/')}?cafile={ca}"
    wrong = {
        f"{broker.tls_url_of('/')}": "certificate",
        f"{broker.tls_url_of('/', host='127.0.0.1')}?cafile={ca}": "not valid for '127.0.0.1'",
        f"{broker.url_of('/').replace('amqp', 'amqps', 1)}?cafile={ca}": "does not speak TLS",
    }

    sound = await seen(replace(settings, transport_url=good), svc)
    careless = await seen(
        replace(settings, transport_url=f"{broker.tls_url_of('/')}?verify=none"), svc
    )
    plain = await seen(
        replace(settings, transport_url=broker.url_of("/", port=broker.tls_port)), svc
    )

    assert {one.level for one in sound} == {Level.OK}
    assert levels(careless)["TLS"] is Level.WARN
    assert levels(careless)[f"broker localhost:{broker.tls_port}"] is Level.OK
    assert "wants amqps://" in failed(plain).remedy
    for url, said in wrong.items():
        found = failed(await seen(replace(settings, transport_url=url), svc))
        assert (found.code, said in found.seen) == (ExitCode.CONFIG, True), found


def test_the_command_line_tells_no_credentials(tmp_path, shared_broker):
    """Not in what is printed and not in what the client would log."""
    tmp_path.chmod(0o700)
    url = shared_broker.url_of("nowhere")
    wrong = url.replace(shared_broker.password, "canary-password")
    (port,) = free_ports(1)
    down = shared_broker.url_of("nowhere", port=port)

    for broker_url in (url, wrong, down):
        answer = gracekit(tmp_path, "doctor", GRACEKIT_TRANSPORT_URL=broker_url)
        assert answer.code in {69, 78}
        assert "FAIL  broker 127.0.0.1:" in answer.out
        assert answer.err == ""
        for secret in (shared_broker.password, "canary", "'tests'", "tests:"):
            assert secret not in answer.out


# -- a broker that does not answer --------------------------------------------------


def freeze(broker: Broker) -> None:
    """Stop its time, and wait until no thread of it runs."""
    broker.freeze()
    tasks = Path(f"/proc/{broker.pid}/task")
    while {(path / "stat").read_text().rpartition(") ")[2][0] for path in tasks.iterdir()} != {"T"}:
        pass


async def test_a_frozen_broker_does_not_hold_doctor(tmp_path, svc, own_broker, own_vhost):
    """It takes the connection and then says nothing: a FAIL, within the bound of one attempt."""
    url = f"{own_broker.url_of(own_vhost)}?connect_timeout=1"
    freeze(own_broker)

    async with asyncio.timeout(20):
        found = failed(await seen(settings_on(url, tmp_path), svc))

    assert found.code is ExitCode.DEPENDENCY
    assert "did not answer in 1 s" in found.seen


async def test_a_question_without_an_answer_is_given_up(own_broker, own_vhost):
    """Also where the channel was opened, and only then nothing comes any more."""
    address = address_of(f"{own_broker.url_of(own_vhost)}?connect_timeout=1")

    async def ask(channel: Channel) -> BrokerAnswer:
        freeze(own_broker)
        await channel.queue_declare("compute", passive=True)
        return BrokerAnswer(fit=Fit.FITS)

    async with desk_at(address) as desk, asyncio.timeout(20):
        with pytest.raises(DependencyError, match="did not answer in 1 s"):
            await desk._ask(ask, "queue compute")


@pytest.mark.parametrize("stage", ["look", "compare"])
async def test_a_broker_that_falls_silent_leaves_a_part_of_the_picture(
    stage, tmp_path, svc, own_broker, own_vhost
):
    """What was not asked is not said to be well."""
    address = address_of(f"{own_broker.url_of(own_vhost)}?connect_timeout=1")

    class Silencing(list[BrokerEntity]):
        """Things of which one is not asked about before the broker is frozen."""

        def __iter__(self) -> Iterator[BrokerEntity]:
            for number, thing in enumerate(super().__iter__()):
                if number == 1 and stage == "look":
                    freeze(own_broker)
                yield thing

    def silencing(profile: object) -> None:
        if stage == "compare":
            freeze(own_broker)

    things = [
        BrokerEntity("exchange", "amq.direct", silencing),
        *entities_of(TOPICS, "amq.topic", ""),
    ]
    async with asyncio.timeout(30):
        picture = await inquire(address, Silencing(things), [shared_queue("compute")], "")
    settings = settings_on(own_broker.url_of(own_vhost), tmp_path)
    scene = BrokerChecks(settings, svc, address, TOPICS, picture)

    assert isinstance(picture.trouble, DependencyError)
    assert (picture.looked, picture.compared) == (stage == "compare", False)
    (trouble,) = scene.check_answers()
    assert (trouble.level, trouble.code) == (Level.FAIL, ExitCode.DEPENDENCY)
    assert "did not answer in 1 s" in trouble.seen
    assert scene.check_profile().level is Level.SKIP
    assert scene.check_readers().level is Level.SKIP
    told = [*scene.check_waiting(), *scene.check_dead_letters()]
    assert bool(told) == (stage == "compare")


# -- what is not said ---------------------------------------------------------------


async def test_what_the_user_may_not_declare_fails(
    settings, svc, shared_broker, rabbit_vhost, rabbit_url
):
    """A start would be refused with 403; the user's name is not repeated."""
    async with transport_to(rabbit_url) as peer:
        await peer.declare([shared_queue("compute")])
    rights = '<<"^reply_">>, <<".*">>, <<".*">>'
    shared_broker.eval(
        "rabbit_auth_backend_internal:set_permissions("
        f'<<"tests">>, <<"{rabbit_vhost}">>, {rights}, <<"test">>)'
    )

    all_found = await seen(settings, svc)
    found = one(all_found, "permissions")
    async with desk_at(address_of(rabbit_url)) as desk:
        (thing,) = [one for one in entities_of(TOPICS, "gracekit", "") if one.name == "compute"]
        answer = await desk.compare(thing, thing.flags(PROFILES["durable"]))

    assert found.level is Level.FAIL
    assert found.seen == (
        "the user may not declare exchange gracekit, queue compute, queue compute_dead"
    )
    assert "rabbitmqctl set_permissions" in found.remedy
    assert one(all_found, "profile").level is Level.SKIP, "nothing could be compared"
    assert (
        answer.said == f"access to queue 'compute' in vhost '{rabbit_vhost}' refused for the user"
    )


async def test_an_exclusive_queue_in_our_place_fails(settings, svc, rabbit_url):
    """Nobody else can declare it as long as its connection lives."""
    async with channel_to(rabbit_url) as channel:
        await channel.queue_declare("compute", exclusive=True)
        found = await seen(settings, svc)

    assert one(found, "exclusive").seen == "queue compute: exclusive to another connection"


async def test_a_queue_whose_node_is_down_is_not_called_missing(
    settings, svc, shared_broker, rabbit_vhost, rabbit_url
):
    """The broker says 404 of it as well, and a start would not be able to read it.

    A node that went takes its classic queues from the table of those that run, and they stay in
    the table of durable ones; so it is played here.
    """
    async with transport_to(rabbit_url) as peer:
        await peer.declare([shared_queue("compute")])
    name = f'rabbit_misc:r(<<"{rabbit_vhost}">>, queue, <<"compute">>)'
    shared_broker.eval(f"mnesia:dirty_delete(rabbit_queue, {name})")
    try:
        found = await seen(settings, svc)
    finally:
        shared_broker.eval(
            f"[Q] = mnesia:dirty_read(rabbit_durable_queue, {name}),"
            " mnesia:dirty_write(rabbit_queue, Q)"
        )

    down = one(found, "queue")
    assert (down.level, down.code) == (Level.FAIL, ExitCode.DEPENDENCY)
    assert "is down or inaccessible" in down.seen
    assert one(found, "profile").level is Level.OK


# -- versions -----------------------------------------------------------------------


def on_4_3(settings: Settings, svc: Service, profile: str) -> BrokerChecks:
    """A broker of which only the version is played."""
    address = address_of(settings.transport_url, profile)
    node = Node(host=address.hosts[0], product="RabbitMQ", version="4.3.5")
    picture = BrokerReport(nodes=[node], looked=True, compared=True, foreign=[])
    return BrokerChecks(settings, svc, address, TOPICS, picture)


def test_a_profile_with_transient_queues_fails_on_4_3(settings, svc):
    """Both settings are named. That version was read about, and is played here."""
    refused = one(on_4_3(settings, svc, "oslo-durable").check_versions(), "transient queues")
    taken = one(on_4_3(settings, svc, "durable").check_versions(), "transient queues")

    assert (refused.level, taken.level) == (Level.FAIL, Level.OK)
    assert "GRACEKIT_DECLARE_PROFILE" in refused.remedy
    assert "rabbit_transient_quorum_queue=true" in refused.remedy


async def test_the_version_is_the_brokers_own(settings, svc):
    """From the connection's first frame; no management plugin is needed."""
    found = await seen(replace(settings, declare_profile="oslo-transient"), svc)

    assert one(found, "version").seen.startswith("RabbitMQ ")
    assert one(found, "transient queues").level is Level.OK


# -- messages and readers -----------------------------------------------------------


async def test_waiting_and_dead_requests_are_counted(settings, svc, rabbit_url):
    """Dead letters are a warning with their number; what waits is only told."""
    inbox = Inbox()
    async with transport_to(rabbit_url) as peer:
        queue = shared_queue("compute")
        await peer.declare([queue])
        for text in ("a", "b", "c"):
            await peer.publish(queue, message(text))
        await peer.consume([queue], inbox.put, prefetch=2)
        for delivery in await inbox.take(2):
            await delivery.dead_letter("unreadable")
    async with channel_to(rabbit_url) as channel:
        await channel.queue_declare("compute_dead", passive=True)

    found = await seen(settings, svc)

    assert one(found, "waiting").seen == "1 in compute"
    assert one(found, "waiting").level is Level.OK
    dead = one(found, "dead letters")
    assert dead.level is Level.WARN
    assert dead.seen.startswith("2 in compute_dead: ")


async def test_what_waits_for_a_host_that_is_gone_is_counted(settings, svc, rabbit_url):
    """AMQP lists no queues, but the store knows which hosts have run. Nobody reads them: a
    warning.
    """
    async with Runtime(svc, replace(settings, host="old")):
        pass
    async with Runtime(svc, replace(settings, host="node-2")):
        async with transport_to(rabbit_url) as peer:
            for queue in (directed_queue("compute", "old"), directed_queue("compute-ops", "old-0")):
                await peer.publish(queue, message("a"))
        found = await seen(settings, svc)
        nameless = await seen(settings, None)

    waits = "1 in compute.old (nobody reads it), 1 in compute-ops.old-0 (nobody reads it)"
    assert one(found, "waiting").seen == one(nameless, "waiting").seen == waits
    assert one(found, "waiting").level is one(nameless, "waiting").level is Level.WARN


async def test_only_the_newest_names_on_record_are_asked_about(settings, svc, monkeypatch):
    """Pods with random names leave one name each, and a question takes time."""
    monkeypatch.setattr(rabbit, "MOST_AWAY", 2)
    for host in ("pod-1", "pod-2", "pod-3"):
        async with Runtime(svc, replace(settings, host=host, instance=host)):
            pass

    found = await seen(settings, svc)

    said = "no message waits; older names on record not asked about: 1"
    assert one(found, "waiting").seen == said


async def test_a_host_whose_old_name_is_not_known_is_told_to_take_it(settings, svc, rabbit_url):
    """A worker of oslo.messaging ran as host1: without GRACEKIT_HOST nobody would read its
    queue.
    """

    def moved(**more: str) -> Settings:
        env = {"GRACEKIT_TRANSPORT_URL": rabbit_url, "GRACEKIT_STORE_URL": settings.store_url}
        return load({"declare_profile": "oslo-transient", **more}, env)

    nothing = await seen(moved(), svc)
    async with transport_to(rabbit_url, "oslo-transient") as peer:
        await peer.declare([shared_queue("compute"), directed_queue("compute", "host1")])
        found = [
            one(await seen(made, svc), "directed queue")
            for made in (moved(), moved(host="host1"), moved(host="host2"))
        ]

    assert "directed queue" not in levels(nothing)
    assert [finding.level for finding in found] == [Level.WARN, Level.OK, Level.OK]
    assert "set GRACEKIT_HOST to its server= name" in found[0].remedy
    assert found[1].seen == "requests to this host come by compute.host1"
    assert "compute.host2, the queue of requests to this host, does not" in found[2].seen


async def test_a_profile_without_dead_letters_says_so(settings, svc):
    """Peers of oslo.messaging have none, and theirs is the profile then."""
    found = one(await seen(replace(settings, declare_profile="oslo-durable"), svc), "dead letters")

    assert found.level is Level.OK
    assert "is gone" in found.seen


async def test_a_foreign_reader_fails_before_any_start(settings, svc, tmp_path, rabbit_url):
    """With stores of one host only the directed queue is covered: start and doctor say the same."""
    other = settings_on(rabbit_url, tmp_path, "other")
    accepted = settings_on(rabbit_url, tmp_path, "other", accept_unshared_store=True)
    harmless = Service("compute")

    @harmless.rpc(on_interrupt="retry")
    async def scan(ctx: Context) -> None: ...

    async with Runtime(svc, settings):
        mine = await seen(settings, svc)
        theirs = await seen(other, svc)
        known = await seen(accepted, svc)
        careless = await seen(other, harmless)
    after = await seen(other, svc)

    check = "foreign readers"
    assert levels(mine)[check] is levels(careless)[check] is levels(after)[check] is Level.OK
    assert levels(known)[check] is Level.WARN
    found = one(theirs, check)
    assert (found.level, found.code) == (Level.FAIL, ExitCode.CONFIG)
    assert "with the store sqlite:///" in found.seen
    assert "or set GRACEKIT_ACCEPT_UNSHARED_STORE=true" in found.remedy
    assert "GRACEKIT_ACCEPT_UNSHARED_STORE=true" not in one(known, check).remedy, "it is set"
    assert ", and a service with another store. " in found.seen
    assert "create must not run twice" in found.seen
    assert "GRACEKIT_ACCEPT_UNSHARED_STORE" in found.remedy


async def test_a_service_of_directed_queues_alone_has_no_shared_queue(
    settings, tmp_path, rabbit_url
):
    """Nor the rule about its readers: only a second store on the queue of the host is one too
    many.
    """
    svc = Service("compute", queues="directed")

    @svc.rpc
    async def create(ctx: Context) -> None: ...

    other = settings_on(rabbit_url, tmp_path, "other")
    elsewhere = replace(other, host="node-2")
    async with Runtime(svc, settings):
        mine = await seen(settings, svc)
        theirs = await seen(elsewhere, svc)
        same = await seen(other, svc)
        with pytest.raises(ConfigError, match=f"read queue compute.{settings.host}"):
            await Runtime(svc, other).__aenter__()

    check = "foreign readers"
    assert levels(mine)[check] is levels(theirs)[check] is Level.OK
    assert one(mine, check).seen == f"no reader of compute.{settings.host} uses another store"
    assert levels(same)[check] is Level.FAIL
    assert levels(mine)["profile"] is Level.OK
    assert "queue compute," not in one(mine, "profile").seen
    assert one(mine, "directed queue").seen.endswith(f"come by compute.{settings.host}")


async def test_a_consumer_that_is_not_ours_is_a_foreign_reader(settings, svc, rabbit_url):
    """An oslo.messaging server on the same topic says nothing, and takes every second request."""
    async with transport_to(rabbit_url) as peer:
        await peer.declare([shared_queue("compute")])
        async with channel_to(rabbit_url) as channel:
            await channel.basic_consume("compute", lambda _: asyncio.sleep(0))
            found = one(await seen(settings, svc), "foreign readers")

    assert found.level is Level.FAIL
    assert "a consumer that is not gracekit's" in found.seen


async def test_topics_come_from_the_runs_where_no_service_is_named(settings, svc):
    """And where there is neither, nothing is said to fit."""
    async with Runtime(svc, settings):
        known = await seen(settings, None)
    unknown = await seen(replace(settings, store_url="sqlite:////nowhere/store.db"), None)

    assert one(known, "profile").level is Level.OK
    assert "queue compute" in one(known, "profile").seen
    assert one(known, "foreign readers").level is Level.OK
    assert one(unknown, "profile").level is Level.SKIP
    assert one(unknown, "foreign readers").level is Level.SKIP
