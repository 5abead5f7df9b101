"""Computes from modes and owners whether another user may use a file.

Only root could try it as that user. The kernel checks more than modes: if a file has an access
control list, and its mode would refuse the user, we assume that the list permits access.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections import deque
from pathlib import Path
from typing import Final

import msgspec

READ: Final = 4
WRITE: Final = 2
SEARCH: Final = 1
"""The right to search a directory, or to execute a file."""
MOST_LINKS: Final = 40  # the kernel's limit
_LIST: Final = "system.posix_acl_access"


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """A user with all groups that its processes have.

    Attributes:
        name: The name or number as given.
        uid: Its user id.
        groups: Ids of its groups.
    """

    name: str
    uid: int
    groups: frozenset[int]


class Obstacle(msgspec.Struct, frozen=True, kw_only=True):
    """The file or directory whose mode refuses a user.

    Attributes:
        place: The file itself, or the first parent directory that the user may not search.
        info: The `stat` of that place.
    """

    place: Path
    info: os.stat_result

    def __str__(self) -> str:
        """`/srv/store (mode 0700, owner root)`."""
        mode = stat.S_IMODE(self.info.st_mode)
        return f"{self.place} (mode {mode:04o}, owner {_name_of(self.info.st_uid)})"


def account_of(user: str, group: str = "", more_groups: tuple[str, ...] = ()) -> Account | None:
    """The user of that name or number, with its groups; None if this machine has no such user.

    Args:
        user: A name or a number.
        group: Replaces the user's primary group, unless it is empty.
        more_groups: Additional groups.
    """
    try:
        entry = pwd.getpwuid(int(user)) if user.isdecimal() else pwd.getpwnam(user)
        own = _group(group) if group else entry.pw_gid
        groups = {own, *os.getgrouplist(entry.pw_name, own), *map(_group, more_groups)}
    except KeyError:
        return None
    return Account(name=user, uid=entry.pw_uid, groups=frozenset(groups))


def _group(name: str) -> int:
    return int(name) if name.isdecimal() else grp.getgrnam(name).gr_gid


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def obstacle(account: Account, path: Path, bits: int) -> Obstacle | None:
    """What prevents *account* from using *path*; None if nothing, or if there is no such file.

    Args:
        account: The user.
        path: Absolute. Links in it are followed, and the directories above their targets count.
        bits: READ, WRITE and SEARCH, added up.

    Raises:
        OSError: this process itself may not read the directory.
    """
    parts, here, links = deque(path.parts[1:]), Path("/"), 0
    while parts:
        if found := _refused(account, here, SEARCH):
            return found
        part = parts.popleft()
        there = here.parent if part == ".." else here / part
        try:
            is_link = there.is_symlink()
            target = there.readlink() if is_link else there
            there.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not is_link:
            here = there
            continue
        links += 1
        if links > MOST_LINKS:
            return None
        parts.extendleft(reversed(target.parts[target.is_absolute() :]))
        here = Path("/") if target.is_absolute() else here
    return _refused(account, here, bits)


def _refused(account: Account, place: Path, bits: int) -> Obstacle | None:
    info = place.stat()
    if account.uid == 0 or _granted(account, info) & bits == bits or _has_list(place):
        return None
    return Obstacle(place=place, info=info)


def _granted(account: Account, info: os.stat_result) -> int:
    """The bits of the mode for the account: the kernel uses only the first matching class."""
    if info.st_uid == account.uid:
        return info.st_mode >> 6 & 7
    return (info.st_mode >> 3 if info.st_gid in account.groups else info.st_mode) & 7


def _has_list(place: Path) -> bool:
    try:
        return bool(os.getxattr(place, _LIST))
    except OSError:
        return False
