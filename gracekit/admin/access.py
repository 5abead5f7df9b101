"""Access rules of the HTTP endpoint: host names, tokens, and keys against repeated actions.

A request is refused before its body is read. This module does not depend on a web framework.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from gracekit.config.admin import AdminAddress, family_of
from gracekit.config.settings import Settings
from gracekit.config.values import words_in
from gracekit.errors import ConfigError, GracekitError
from gracekit.telemetry.safe_text import Sentence
from gracekit.telemetry.telemetry import Telemetry

SHORTEST_TOKEN: Final = 16
"""Least characters of a token, so that it cannot be guessed."""
LONGEST_NAME: Final = 100
_LINE: Final = "name:token:scope"
KEY_LIFE_S: Final = 60.0
"""Seconds for which an action key can be used."""
_HOST: Final = re.compile(r"(?:\[([\da-fA-F:.]+)\]|([\w.-]+))(?::\d*)?", re.ASCII)
"""The form of a Host header: an address in brackets, or a name; no user or path beside it."""


class Need(enum.IntEnum):
    """What a path requires of its client; also the scope of a token, which may do no more."""

    PROBE = 0  # nothing, unless `admin_open` is `nothing`
    METRICS = 1  # the same
    READ = 2  # a token, if there is a token file
    ACT = 3  # a name to record; actions check their key themselves


_SCOPES: Final = {need.name.lower(): need for need in Need}
_Known = tuple[bytes, Need]
"""The digest of a token, and its scope."""


class RefusedError(GracekitError):
    """A request that is not allowed.

    Args:
        status: The HTTP status, 400, 401 or 403.
        why: One word for the log: `headers`, `host`, `token`, `uid`, `scope`, `origin`,
            `read-only`, `key`.
        message: For the client.
    """

    def __init__(self, status: int, why: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.why = why


class Asking(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a request on which access depends.

    Attributes:
        host: The unchanged Host header.
        origin: The Origin header; None if no browser page sent the request.
        token: The token in the Authorization header; None without one.
        uid: Uid of the client's process, as the kernel reports it; None for TCP.
    """

    host: str
    origin: str | None = None
    token: str | None = None
    uid: int | None = None


class Tokens:
    """The names, tokens and scopes of a file, read again when it changes.

    Args:
        path: Lines of `name:token:scope`; blank ones and those that begin with # are skipped.
        report: Called once each time that the file changes and cannot be used.

    Raises:
        ConfigError: the file cannot be read, others may read it, or a line is wrong.
    """

    def __init__(self, path: Path, report: Callable[[ConfigError], object]) -> None:
        self._path = path
        self._report = report
        self._reported: tuple[object, str] | None = None
        self._found: tuple[int, int, int] | None = None  # state of the file; None if it is missing
        self._seen: tuple[int, int, int] | None = None  # the state that was read
        self._known: Mapping[str, _Known] = {}
        self._read_changed()

    def scope_of(self, token: str) -> tuple[str, Need] | None:
        """The name that *token* belongs to, and its scope; None if it is unknown.

        While the file is missing or empty no token is valid; this is the way to withdraw tokens.
        If it is unusable in another way, the tokens read before stay valid, because a half-written
        file must not lock out all operators.
        """
        try:
            self._read_changed()
        except ConfigError as error:
            state = (self._found, str(error))
            if state != self._reported:
                self._reported = state
                self._report(error)
        else:
            self._reported = None
        given, found = _digest(token), None
        for name, (digest, scope) in self._known.items():  # all, so that timing shows no match
            if hmac.compare_digest(digest, given):
                found = name, scope
        return found

    def _read_changed(self) -> None:
        self._found = None
        try:
            with open(self._path, encoding="utf-8", opener=_open_at_once) as file:
                status = os.fstat(file.fileno())
                # ctime changes with the mode too.
                self._found = (status.st_ino, status.st_ctime_ns, status.st_size)
                if self._found == self._seen:
                    return
                self._check_readers(status)
                lines = file.read().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            if isinstance(error, FileNotFoundError):
                self._known, self._seen = {}, None
            raise ConfigError(
                f"admin_token_file {self._path} cannot be read: {error}; it must be a file of "
                f"`{_LINE}` lines in UTF-8 that uid {os.geteuid()} alone may read: chown it to "
                "that user, and chmod 600"
            ) from error
        self._known = dict(_tokens(self._path, lines))
        self._seen = self._found
        if not self._known:
            raise ConfigError(
                f"admin_token_file {self._path} holds no token; write `{_LINE}` lines"
            )

    def _check_readers(self, status: os.stat_result) -> None:
        me, mode = os.geteuid(), stat.S_IMODE(status.st_mode)
        if status.st_uid not in {0, me}:
            raise ConfigError(
                f"admin_token_file {self._path} belongs to uid {status.st_uid}, who may read the "
                f"tokens; it must belong to uid {me}, which the service runs as, or to root: "
                f"chown {me} {self._path}"
            )
        # Kubernetes mounts a Secret as a file of root that the pod's group may read; in a pod that
        # runs as root, that is root's group.
        is_given = status.st_uid == 0 and (me != 0 or status.st_gid == 0)
        if mode & (0o037 if is_given else 0o077):
            raise ConfigError(
                f"admin_token_file {self._path} has mode {mode:04o}, so others may "
                f"read the tokens: chmod 600 {self._path}"
            )


def _open_at_once(path: str, flags: int) -> int:
    """Open a plain file; for a FIFO a blocking open would stop the event loop."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = {stat.S_IFIFO: "a FIFO", stat.S_IFDIR: "a directory"}.get(stat.S_IFMT(mode))
        raise OSError(f"it is {kind or 'a device'}")
    return descriptor


def _tokens(path: Path, lines: Iterable[str]) -> Iterable[tuple[str, _Known]]:
    found: dict[str, tuple[int, bytes]] = {}  # by name: line and digest
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, colon, rest = line.partition(":")
        token, _, scope = (part.strip() for part in rest.partition(":"))
        name = name.strip()
        if not (colon and name and len(name) <= LONGEST_NAME) or len(token) < SHORTEST_TOKEN:
            raise ConfigError(
                f"line {number} of admin_token_file {path} is no `{_LINE}` with a token of at "
                f"least {SHORTEST_TOKEN} characters: `openssl rand -hex 16` makes one"
            )
        if scope not in _SCOPES:
            raise ConfigError(
                f"line {number} ({name!r}) of admin_token_file {path} must end with one of the "
                f"scopes {', '.join(_SCOPES)}; a token has no colon: write `{_LINE}`"
            )
        if name in found:
            raise ConfigError(f"admin_token_file {path} names {name!r} twice; leave one line")
        digest = _digest(token)
        for other, (line_of_other, used) in found.items():
            if used == digest:
                raise ConfigError(
                    f"lines {line_of_other} ({other!r}) and {number} ({name!r}) of "
                    f"admin_token_file {path} have the same token, so the record could not tell "
                    "who has acted: give each name a token of its own (`openssl rand -hex 16`)"
                )
        found[name] = number, digest
        yield name, (digest, _SCOPES[scope])


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()


class ActionKeys:
    """Keys that operators fetch before an action; each works once, for a minute, in this run.

    So an action that is recorded and replayed has no effect, neither in this run nor in the next
    one of its instance. Only used keys are kept in memory, until they expire.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._secret = secrets.token_bytes(32)
        self._used: dict[str, float] = {}  # key to the time at which it expires

    def issue(self) -> str:
        """A new key."""
        claim = f"{self._now() + KEY_LIFE_S:.3f}.{secrets.token_hex(16)}"
        return f"{claim}.{self._sign(claim)}"

    def use(self, key: str) -> None:
        """Accept *key*, once.

        Raises:
            RefusedError: it was used, has expired, or this run did not issue it.
        """
        claim, _, signature = key.rpartition(".")
        given = signature.encode(errors="replace")
        if not hmac.compare_digest(given, self._sign(claim).encode()):
            raise RefusedError(403, "key", f"this run did not issue this key: {_HOW}")
        now = self._now()
        self._used = {used: until for used, until in self._used.items() if until > now}
        expires_at = float(claim.partition(".")[0])
        if key in self._used:
            raise RefusedError(403, "key", f"this key was used already, and works once: {_HOW}")
        if now >= expires_at:
            raise RefusedError(403, "key", f"this key is older than {KEY_LIFE_S:.0f} s: {_HOW}")
        self._used[key] = expires_at

    def _sign(self, claim: str) -> str:
        return hmac.new(self._secret, claim.encode(errors="replace"), hashlib.sha256).hexdigest()


_HOW: Final = "fetch one by GET /api/v1/action-key right before each action"


class Access:
    """Decides what a request may do.

    Args:
        hosts: Permitted names in the Host header, beside IP addresses and localhost.
        tokens: The accepted tokens; None if there is no token file.
        by_socket: Whether clients are identified by their uid, on a unix socket.
        is_mounted: Whether another program serves this application. As any client may reach that
            program, only probes and metrics are answered without a token file.
        needs_token: Whether probes need a token too.
        read_only: Whether all actions are refused.
    """

    def __init__(
        self,
        *,
        hosts: Iterable[str] = (),
        tokens: Tokens | None = None,
        by_socket: bool = False,
        is_mounted: bool = False,
        needs_token: bool = False,
        read_only: bool = False,
    ) -> None:
        self._hosts = frozenset(host.lower() for host in hosts)
        self._tokens = tokens
        self._by_socket = by_socket
        self._is_mounted = is_mounted
        self._needs_token = needs_token
        self.read_only = read_only
        self.keys = ActionKeys()

    def admit(self, asking: Asking, need: Need) -> str:
        """Check a request; return the client's name to record, or empty if it needs none.

        Raises:
            RefusedError: the request is not allowed.
        """
        self._check_host(asking.host)
        if need <= Need.METRICS and not self._needs_token:
            return ""
        who = self._who(asking, need)
        if need is Need.ACT:
            self._check_act(asking, who)
        return who

    def _check_host(self, host: str) -> None:
        """Refuse unknown host names: a page that uses DNS rebinding then gets no answer."""
        found = _HOST.fullmatch(host)
        name = (found[1] or found[2]).lower() if found else ""
        if self._by_socket or name in self._hosts or name == "localhost":
            return
        if family_of(name) is None:
            raise RefusedError(
                403,
                "host",
                f"{host[:LONGEST_NAME]!r} does not name this endpoint: use an IP address, or add "
                "the name to GRACEKIT_ADMIN_HOSTS",
            )

    def _who(self, asking: Asking, need: Need) -> str:
        if self._tokens is None:
            return self._who_without_tokens(asking)
        if asking.token is None:
            raise RefusedError(401, "token", "send `Authorization: Bearer TOKEN`")
        found = self._tokens.scope_of(asking.token)
        if found is None:
            raise RefusedError(
                401, "token", "this token is not in the file of GRACEKIT_ADMIN_TOKEN_FILE"
            )
        name, scope = found
        if scope < need:
            raise RefusedError(
                403,
                "scope",
                f"the token of {name!r} has the scope {scope.name.lower()}, and this needs "
                f"{need.name.lower()}: its line in the file of GRACEKIT_ADMIN_TOKEN_FILE says so",
            )
        return f"token {name}"

    def _who_without_tokens(self, asking: Asking) -> str:
        if self._by_socket:
            return _user(asking.uid)
        if self._is_mounted:
            raise RefusedError(
                403,
                "token",
                "without tokens a mounted application answers probes and /metrics alone: set "
                f"GRACEKIT_ADMIN_TOKEN_FILE to a file of `{_LINE}` lines with mode 0600",
            )
        return ""

    def _check_act(self, asking: Asking, who: str) -> None:
        if self.read_only:
            raise RefusedError(
                403, "read-only", "this endpoint is read-only: GRACEKIT_ADMIN_READ_ONLY is set"
            )
        if not who:
            raise RefusedError(
                403,
                "token",
                "an action needs a name for the record: set GRACEKIT_ADMIN_TOKEN_FILE, or use "
                "GRACEKIT_ADMIN=unix:/path, or `gracekit drain` on the host",
            )
        if asking.origin is not None and not _is_origin(asking.origin, asking.host):
            raise RefusedError(403, "origin", "a page of another site may not act here")


def _is_origin(origin: str, host: str) -> bool:
    try:
        return urlsplit(origin).netloc == host
    except ValueError:  # such as `http://[`
        return False


def _user(uid: int | None) -> str:
    if uid not in {0, os.geteuid()}:
        raise RefusedError(
            403,
            "uid",
            f"uid {uid} may not ask this run: it answers uid {os.geteuid()}, which it runs as, and "
            "root; others need a token of GRACEKIT_ADMIN_TOKEN_FILE",
        )
    return f"uid {uid}"


def access_of(settings: Settings, address: AdminAddress | None, telemetry: Telemetry) -> Access:
    """The access rules of *settings*; *address* is None if the program itself serves HTTP.

    Raises:
        ConfigError: the token file cannot be used.
    """

    def report(error: ConfigError) -> None:
        telemetry.emit("admin.tokens_unusable", error=Sentence(error))

    file = settings.admin_token_file
    tokens = None if file is None else Tokens(Path(file), report)
    is_socket = address is not None and address.path is not None
    return Access(
        hosts=(settings.host, socket.gethostname(), *words_in(settings.admin_hosts)),
        tokens=tokens,
        by_socket=is_socket and file is None,
        is_mounted=address is None,
        needs_token=settings.admin_open == "nothing",
        read_only=settings.admin_read_only,
    )
