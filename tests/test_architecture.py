"""The house rules that a machine can check: floors, sisters, names, what an import loads."""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

import gracekit
import gracekit.testing
from gracekit import errors

PACKAGE: Final = Path(__file__).resolve().parent.parent / "gracekit"

_GROUND: Final = {
    "errors", "exits", "version", "clock", "backoff", "phase", "signals", "streams", "life",
    "end_timer", "process", "parts", "notify", "callables", "keeper",
}  # fmt: skip
_BESIDE_ALL: Final = {
    "background", "config", "telemetry", "tracing", "stop_signals",
}  # fmt: skip
_ABOVE_REQUESTS: Final = {"dispatcher", "periodic", "hooks"}
_FACE: Final = {"service", "runtime"}

# From the ground up. A module imports from the floors below its own; modules of one floor do not
# know each other, except inside one package (store, rpc, ...) and where SAME_FLOOR allows it.
FLOORS: Final = (
    _GROUND,
    _BESIDE_ALL,
    {"store"},
    {"rpc", "tracker", "runs"},
    {"journal"},  # of what the tracker knows
    {"leases"},  # granted by what the rows of tasks say
    {"request"},  # here rpc, journal and leases meet
    {"listings"},  # what is on record, for commands and HTTP
    _ABOVE_REQUESTS,
    {"recovery"},
    {"drain", "membership"},
    {"control", "upkeep", "leasing"},
    {"admin"},
    _FACE,
    {"doctor", "web"},
    {"deploy"},  # judged by doctor
    {"cli"},
    {"demo"},  # a command of its own
    {"testing"},  # may import anything; nothing imports it
)
STRANGERS: Final = ({"rpc", "journal", "runs"}, {"rpc", "tracker", "leases", "runs"})
ENTRANCES: Final = {"", "__main__"}  # `gracekit` itself and `python -m gracekit`: they only point

# The words of the ground floor name each other, and the upper rooms are one flat each.
SAME_FLOOR: Final = (
    _GROUND,
    _BESIDE_ALL,
    _ABOVE_REQUESTS,
    _FACE,
)

# What an embedding program must not load: broker, command line, terminal, Prometheus' library.
NOT_LOADED: Final = (
    "starlette",
    "uvicorn",
    "aio_pika",
    "aiormq",
    "psycopg",
    "gracekit.store.postgres",
    "click",
    "opentelemetry.sdk",
    "prometheus_client",
    "gracekit.cli",
    "gracekit.demo",
    "gracekit.testing",
)

# What a service on SQLite without a file of settings has no use for, beside those.
NOT_NEEDED: Final = (
    "anyio",
    "importlib.resources",
    "tempfile",
    "tomllib",
    "zipfile",
    "gracekit.admin.endpoint",
    "gracekit.config.oslo",
    "gracekit.doctor",
)
SERVING: Final = """
import asyncio
before = set(sys.modules)
from gracekit import Runtime, Service, Settings
svc = Service("compute")
svc.rpc(on_interrupt="retry")(lambda ctx: None)
async def serve(settings):
    async with Runtime(svc, settings):
        return set(sys.modules) - before
"""


class Import(NamedTuple):
    """One import statement inside the package."""

    place: str  # file and line, for the message
    room: str  # top-level part of the importing module: "store", "config", "" for __init__
    target: str  # top-level part of the imported one
    late: bool  # inside a function, so not part of loading the module


def modules() -> Iterator[tuple[Path, str]]:
    """Every module of the package with the room that it lives in."""
    for path in sorted(PACKAGE.rglob("*.py")):
        inside = path.relative_to(PACKAGE)
        room = inside.parts[0].removesuffix(".py")
        yield path, "" if room == "__init__" else room


def imports() -> Iterator[Import]:
    """Every import of one gracekit module by another, also the ones inside functions."""
    for path, room in modules():
        tree = ast.parse(path.read_text(), str(path))
        early = set(tree.body)
        for node in ast.walk(tree):
            for target in _targets(node, path):
                place = f"{path.relative_to(PACKAGE.parent)}:{getattr(node, 'lineno', 0)}"
                yield Import(place, room, target, late=node not in early)


def _targets(node: ast.AST, path: Path) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            for alias in names:
                yield from _inside(alias.name)
        case ast.ImportFrom(module="gracekit", level=0, names=names):
            for alias in names:
                is_module = (PACKAGE / alias.name).exists() or (
                    PACKAGE / f"{alias.name}.py"
                ).exists()
                yield alias.name if is_module else ""
        case ast.ImportFrom(module=str(module), level=0):
            yield from _inside(module)
        case ast.ImportFrom(level=level) if level > 0:
            raise AssertionError(f"{path}:{node.lineno}: relative import; write gracekit.…")


def _inside(name: str) -> Iterator[str]:
    parts = name.split(".")
    if parts[0] == "gracekit":
        yield parts[1] if len(parts) > 1 else ""


def floor_of(room: str) -> int:
    """Storey of a room, counted from the ground; one without a place is above all."""
    return next((number for number, rooms in enumerate(FLOORS) if room in rooms), len(FLOORS))


def is_allowed(room: str, target: str) -> bool:
    """Whether *room* may import *target*."""
    if room in ENTRANCES or room == target:
        return True
    if target in ENTRANCES:
        return False  # the face re-exports the house, so a room that imported it would loop
    if any({room, target} <= flat for flat in SAME_FLOOR):
        return True
    return floor_of(target) < floor_of(room)


def test_every_module_has_a_floor():
    """A new top-level module is given a place in the table before it is used."""
    known = set().union(*FLOORS) | ENTRANCES

    assert {room for _, room in modules()} - known == set()


def test_imports_go_strictly_downward():
    """No module imports from its own floor or from above."""
    wrong = [i for i in imports() if not is_allowed(i.room, i.target)]

    assert [f"{i.place}: {i.room} imports {i.target or 'gracekit'}" for i in wrong] == []


def test_sisters_do_not_know_each_other():
    """rpc, journal, leases and runs meet in request and above; leases alone know the rows of
    tasks.
    """
    between = [
        i
        for i in imports()
        for rooms in STRANGERS
        if {i.room, i.target} <= rooms and i.room != i.target
    ]

    assert [i.place for i in between] == []


# The tables of the store: the rooms that write them, and the other rooms that read them.
TABLES: Final = {
    "run": ("runs journal", "leases listings"),  # retention deletes rows
    "task": ("journal", "leases listings doctor store testing"),  # a backup counts rows
    "content": ("journal", "listings testing"),
    "reply": ("journal", "listings doctor"),
    "outbox": ("journal", "listings testing"),
    "beat": ("runs", "leases"),
    "wish": ("runs", ""),
    "pause": ("journal", ""),
    "gone_host": ("runs", "journal"),
    "lease": ("leases", "journal listings"),
    "epoch": ("leases store", "journal doctor"),  # a backup is marked as a copy
    "hold": ("journal", "listings doctor"),
    "finding": ("journal", "leases listings"),
    "resource_pass": ("journal", "listings"),
    "broken_kind": ("journal", "listings"),
    "consumed": ("journal", ""),
    "tally": ("journal", "listings doctor"),
    "incident": ("journal", "listings doctor store"),
}
_WRITES: Final = re.compile(r"\b(?:INSERT INTO|UPDATE|DELETE FROM) (\w+)")
_READS: Final = re.compile(r"(?<!DELETE )\b(?:FROM|JOIN) (\w+)")


def test_each_table_of_the_store_is_written_in_one_room():
    """The table above is what the statements do: who writes, and who else reads."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for path, room in modules():
        for text in _texts_of(ast.parse(path.read_text())):
            for what, sign in (("writes", _WRITES), ("reads", _READS)):
                for name in sign.findall(text):
                    found[what, name].add(room)

    schema = "".join(path.read_text() for path in PACKAGE.glob("store/sqlite/migrations/*.sql"))
    assert set(re.findall(r"CREATE TABLE (\w+)", schema)) == TABLES.keys()
    for name, (writers, readers) in TABLES.items():
        assert found["writes", name] == set(writers.split()), name
        assert found["reads", name] - found["writes", name] == set(readers.split()), name


def _texts_of(tree: ast.Module) -> Iterator[str]:
    """The texts of a module, but for its docstrings."""
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if node not in docstrings:
                yield text


def test_life_is_judged_in_one_place():
    """No other module asks a lock or the process table whether somebody lives."""
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path, _ in modules()
        if any(_judgements(ast.parse(path.read_text())))
    }

    assert found == {"life.py", "keeper.py"}  # which knows the child that it has started


@pytest.mark.parametrize(
    ("code", "is_one"),
    [
        ("os.kill(run.pid, 0)", True),
        ("os.kill(pid, signal.SIGCONT)", True),
        ("from os import kill as ask", True),
        ("os.pidfd_open(pid)", True),
        ("probe = signal.pidfd_send_signal", True),
        ("import psutil", True),
        ("open(f'/proc/{run.pid}/stat')", True),
        ("'/proc/%d/stat' % pid", True),
        ("'/proc/{}'.format(pid)", True),
        ("'/proc/' + str(pid)", True),
        ("Path('/proc') / str(pid)", True),
        ("Path('/proc', str(pid), 'status')", True),
        ("(proc / str(pid) / 'stat').read_text()", True),
        ("os.path.join('/proc', str(pid), 'cmdline')", True),
        ("Path('/proc/sys/kernel/random/boot_id').read_text()", True),
        ("Path('/proc/self/ns/time').stat()", True),
        ("fcntl.fcntl(fd, fcntl.F_OFD_GETLK, whole)", True),
        ("fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)", True),
        ("from fcntl import LOCK_NB", True),
        ("os.kill(os.getpid(), signal.SIGTERM)", False),
        ("child.kill()", False),
        ("fcntl.lockf(fd, fcntl.LOCK_EX)", False),
        ("Path('/proc/self/mountinfo').read_bytes()", False),
        ("def f():\n    'As /proc/1/stat says.'", False),
    ],
)
def test_a_judgement_of_life_is_found_however_it_is_written(code: str, is_one: bool):
    """A sign is what the code names, calls or reads, and not how its line looks."""
    assert any(_judgements(ast.parse(code))) is is_one


_LOCK_SIGNS: Final = ("F_OFD_", "F_GETLK", "F_SETLK", "LOCK_NB")
_TABLE_SIGNS: Final = {"pidfd_open", "pidfd_send_signal", "killpg", "getpgid", "getsid", "psutil"}
_PROC_SIGNS: Final = re.compile(
    r"/proc/+(\*|%|\{|\d|$|self/(stat|ns))|random/boot_id|\*/stat$|ns/time"
)


def _judgements(tree: ast.AST) -> Iterator[ast.AST]:
    """Places of a module that ask a lock or the process table for somebody's life."""
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node in docstrings:
            continue
        if _signals_another(node) or _PROC_SIGNS.search(_text_of(node)):
            yield node
        for name in _names_of(node):
            if name in _TABLE_SIGNS or name.startswith(_LOCK_SIGNS):
                yield node


def _names_of(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            yield name
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            yield from (alias.name for alias in names)


def _signals_another(node: ast.AST) -> bool:
    """Whether it may send a signal, 0 for one, to another process than its own."""
    match node:
        case ast.ImportFrom(module="os", names=names):
            return any(alias.name == "kill" for alias in names)
        case ast.Call(func=ast.Attribute(attr="kill"), args=[pid, _]):
            return ast.unparse(pid) != "os.getpid()"
    return False


def _text_of(node: ast.AST) -> str:
    """A string or path as far as the code shows it, with `*` for what it does not."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(map(_text_of, values))
        case ast.BinOp(left=left, op=ast.Add() | ast.Div() as op, right=right):
            between = "/" if isinstance(op, ast.Div) else ""
            return f"{_text_of(left)}{between}{_text_of(right)}"
        case ast.Call(args=[first, *rest]) if _text_of(first).startswith("/proc"):
            return "/".join(map(_text_of, (first, *rest)))  # Path(...), join(...)
        case ast.expr():
            return "*"
    return ""


def test_flats_of_one_floor_have_no_import_cycle():
    """Modules that may know each other still load in one direction."""
    edges = {
        (i.room, i.target)
        for i in imports()
        if i.room != i.target
        and not i.late
        and any({i.room, i.target} <= flat for flat in SAME_FLOOR)
    }

    assert [(a, b) for a, b in edges if (b, a) in edges and a < b] == []


def test_nothing_imports_testing():
    """The product does not depend on its test mode."""
    users = [i for i in imports() if i.target == "testing" and i.room != "testing"]

    assert [i.place for i in users] == []


def test_rooms_hold_no_state():
    """No module binds an empty or mutable container that functions could fill, and none says
    `global`.
    """
    wrong = [
        f"{path.relative_to(PACKAGE.parent)}:{node.lineno}"
        for path, _ in modules()
        for node in _stateful(ast.parse(path.read_text()))
    ]

    assert wrong == []


def _stateful(tree: ast.Module) -> Iterator[ast.stmt]:
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and _is_container(node.value):
            yield node
    for inner in ast.walk(tree):
        if isinstance(inner, ast.Global):
            yield inner


def _is_container(value: ast.expr | None) -> bool:
    match value:
        case ast.Dict(keys=[]) | ast.List(elts=[]):
            return True
        case ast.Call(func=ast.Name(id="dict" | "list" | "set" | "deque"), args=[]):
            return True
        case ast.Call(
            func=ast.Name(id="defaultdict" | "WeakKeyDictionary" | "WeakValueDictionary")
        ):
            return True
    return False


def test_a_set_of_words_is_written_once():
    """No two enums, `Literal`s, tuples or sets of texts hold the same words: one would be
    forgotten.
    """
    places: dict[frozenset[str], list[str]] = {}
    for path, _ in modules():
        for line, words in _sets_of_words(ast.parse(path.read_text())):
            places.setdefault(words, []).append(f"{path.relative_to(PACKAGE)}:{line}")

    assert {words: found for words, found in places.items() if len(found) > 1} == {}


def _sets_of_words(tree: ast.Module) -> Iterator[tuple[int, frozenset[str]]]:
    """Of a module's constants and classes; a `Literal` holds a tuple."""
    for node in tree.body:
        lists: list[list[ast.expr]] = []
        match node:
            case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
                kinds = ast.Tuple | ast.Set | ast.List
                lists = [part.elts for part in ast.walk(value) if isinstance(part, kinds)]
            case ast.ClassDef(body=body):
                lists = [[one.value for one in body if isinstance(one, ast.Assign)]]
        for parts in lists:
            words = {part.value for part in parts if isinstance(part, ast.Constant)}
            if 1 < len(words) == len(parts) and all(isinstance(word, str) for word in words):
                yield node.lineno, frozenset(words)


def _face() -> set[str]:
    if not (PACKAGE / "__init__.py").exists():
        pytest.skip("the public face is not written yet")
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return set(ast.literal_eval(value))
            case ast.AnnAssign(target=ast.Name(id="__all__"), value=ast.expr() as value):
                return set(ast.literal_eval(value))
    return set()


def test_no_public_name_is_a_module():
    """`gracekit.x` is either a public name or a module, so that imports mean one thing."""
    modules_and_packages = {
        entry.stem for entry in PACKAGE.iterdir() if entry.is_dir() or entry.suffix == ".py"
    }

    assert _face() & modules_and_packages == set()


def test_errors_that_callers_branch_on_are_public():
    """What a call can raise is imported from `gracekit`; mistakes of the program need no name
    there.
    """
    mistakes = {"BadMessageError", "MessageTooLargeError", "UnserialisableError"}
    raised = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.RpcError)
    }

    assert raised - mistakes - _face() == set()


NO_ERRORS: Final = {
    "Draining",
    "Gone",
    "LeaseExists",
    "LeaseHeld",
    "NoCapacity",
    "NoSuchLease",
    "Parked",
    "TryAgain",
    "Undeliverable",
}


def test_exceptions_end_in_error_or_are_named_for_a_state():
    """Callers expect these; the docstring of the module lists them."""
    others = {one.name for one in _exceptions() if not one.name.endswith("Error")}

    assert others == NO_ERRORS
    assert all(f"`{name}`" in (errors.__doc__ or "") for name in others)


def _exceptions() -> list[ast.ClassDef]:
    """Every class of the package that `except Exception` catches."""
    classes = [
        node
        for path, _ in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    kinds = vars(builtins).values()
    known = {k.__name__ for k in kinds if isinstance(k, type) and issubclass(k, Exception)}
    found: list[ast.ClassDef] = []
    while fresh := [
        node
        for node in classes
        if node not in found and {ast.unparse(base).split(".")[-1] for base in node.bases} & known
    ]:
        found += fresh
        known |= {node.name for node in fresh}
    return found


@pytest.mark.process
def test_import_loads_no_broker_and_no_command_line():
    """All public names together cost an embedded user neither a broker library nor the CLI."""
    code = f"from gracekit import *; print([n for n in {NOT_LOADED!r} if n in sys.modules])"

    assert _said_by(code) == "[]"


@pytest.mark.process
def test_a_service_loads_nothing_that_it_has_no_use_for(tmp_path: Path):
    """A start on SQLite loads no module for RabbitMQ, HTTP, threads, files of settings or
    archives.
    """
    urls = f"store_url='sqlite:///{tmp_path}/store.db', transport_url='sqlite:///{tmp_path}/q.db'"
    useless = {*NOT_LOADED, *NOT_NEEDED}
    code = (
        f"{SERVING}\nloaded = asyncio.run(serve(Settings({urls})))\n"
        f"print(sorted(loaded & {useless!r}), 'gracekit.store.engine' in loaded)"
    )

    assert _said_by(code) == "[] True"


@pytest.mark.process
def test_commands_for_whole_runs_load_nothing_of_a_service():
    """Scripts and probes call them often, and each call pays for what it loads."""
    of_a_service = ("gracekit.runtime", "gracekit.leases", "gracekit.request", "opentelemetry")
    code = (
        "import gracekit.cli.status, gracekit.cli.drain, gracekit.cli.health; "
        f"print([n for n in sys.modules if n.startswith({of_a_service!r})])"
    )

    assert _said_by(code) == "[]"


@pytest.mark.process
def test_import_loads_no_module_of_the_package():
    """Each public name loads what it needs when it is used: the command line needs few of them."""
    code = "import gracekit; print([n for n in sys.modules if n.startswith('gracekit.')])"

    assert _said_by(code) == "[]"


def _said_by(code: str) -> str:
    answer = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}"],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert answer.stderr == ""
    return answer.stdout.strip()


def test_every_public_name_is_what_type_checkers_see():
    """They read the imports under TYPE_CHECKING; at run time the table beside it is asked."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (shown,) = (node for node in tree.body if isinstance(node, ast.If))
    imported = {
        alias.name: node.module
        for node in shown.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    assert set(imported) == _face() == set(gracekit.__all__)
    for name, module in imported.items():
        assert getattr(gracekit, name) is getattr(importlib.import_module(str(module)), name)


def test_a_name_that_is_not_public_is_an_attribute_error():
    """As of any module, so that `hasattr` and a debugger work."""
    with pytest.raises(AttributeError, match="'gracekit' has no attribute 'Servcie'"):
        gracekit.Servcie  # noqa: B018 - the access is the test
    assert set(gracekit.__all__) <= set(dir(gracekit))


KEPT_DATACLASSES: Final = {
    "Host": "it leaves the login out of its repr",
    "BrokerEntity": "two are equal whatever their function is",
}
"""Dataclasses that users do not get, and why they are no structs."""


def test_only_what_users_get_is_a_dataclass():
    """A service imports more than a hundred classes, and a dataclass costs as much as thirty
    structs.
    """
    made = {
        node.name
        for path, _ in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        and any("dataclass" in ast.unparse(line) for line in node.decorator_list)
    }

    assert made - {*gracekit.__all__, *gracekit.testing.__all__} == KEPT_DATACLASSES.keys()


# -- pauses ---------------------------------------------------------------------------------


def test_every_pause_before_a_next_try_stands_in_one_module():
    """Nobody else names such a pause, or waits for a number of seconds that has no name."""
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path, room in modules()
        if room not in {"backoff", "testing", "demo"}
        for node in _pauses(ast.parse(path.read_text()))
    ]

    assert wrong == []


def _pauses(tree: ast.Module) -> Iterator[ast.stmt | ast.expr]:
    sign = re.compile(r"(PAUSE|AGAIN|RETRY|BACK_?OFF|AGAIN_AFTER)_S$")
    for node in tree.body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name)) if sign.search(name):
                yield node
    for part in ast.walk(tree):
        match part:
            case ast.Call(func=ast.Attribute(attr="sleep"), args=[ast.Constant(value=seconds)]):
                if seconds != 0:
                    yield part


# -- size -----------------------------------------------------------------------------------

LONGEST_MODULE: Final = 600
LONGEST_FUNCTION: Final = 60
LONGER: Final = {
    "config/settings.py": "the table of all settings with their rules, which is read as one",
}
"""Modules above the limit, and why."""


def test_modules_and_functions_can_be_read_at_a_sitting():
    """At most 600 lines a module and 60 a function, but for those that are named with a reason."""
    long = {}
    for path, _ in modules():
        text, name = path.read_text(), str(path.relative_to(PACKAGE))
        if len(text.splitlines()) > LONGEST_MODULE:
            long[name] = len(text.splitlines())
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                assert lines <= LONGEST_FUNCTION, f"{name}: {node.name} has {lines} lines"

    assert long.keys() == LONGER.keys()


SHORTEST_MODULE: Final = 50
SHORTER: Final = {
    "web.py": "one public thing, for applications of the web",
    "runs/names.py": "the names of files, which commands ask before they load anything else",
    "version.py": "read without loading anything else",
}
"""Modules below that, and why. Statements, `__init__` and `__main__` may be short."""
MOST_MODULES: Final = 25
"""In one directory, but for `cli/`, which has a module for each command."""


def test_the_tree_has_neither_crumbs_nor_crowds_and_each_name_once():
    """A module is worth its file, a room can be taken in at a glance, and a name tells one
    place.
    """
    modules_in = Counter[Path]()
    named = Counter[str]()
    short = set()
    for path, _ in modules():
        inside = path.relative_to(PACKAGE)
        if path.name.startswith("__"):
            continue
        modules_in[inside.parent] += 1
        if inside.parts[0] != "cli":
            named[path.name] += 1
        is_short = len(path.read_text().splitlines()) < SHORTEST_MODULE
        if is_short and not path.name.endswith("_sql.py"):
            short.add(str(inside))

    assert short == SHORTER.keys()
    assert [str(room) for room, n in modules_in.items() if n > MOST_MODULES] == ["cli"]
    assert [name for name, n in named.items() if n > 1] == []


def test_contributing_names_files_that_exist():
    """Who wants to change something is sent to a place that is there."""
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`((?:gracekit|tests|docs)/[\w./]+)`", text)

    assert len(named) > 25
    assert [name for name in named if not (PACKAGE.parent / name).exists()] == []


def test_contributing_sends_to_every_room():
    """There is no room in which no change has its place."""
    root = PACKAGE.parent
    drawing = (root / "ARCHITECTURE.md").read_text().split("```")[1]
    rooms = {name.strip("/") for line in drawing.splitlines() for name in line[:24].split()}
    named = re.findall(r"`gracekit/(\w+)", (root / "CONTRIBUTING.md").read_text())

    assert rooms >= {"errors", "store", "request", "dispatcher", "web", "testing"}
    assert rooms - set(named) == set()
