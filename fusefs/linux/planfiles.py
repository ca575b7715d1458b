"""The files of a plan, those that are named and those in directories, read by this machine's clock and users."""

from __future__ import annotations

import grp
import os
import pwd
import time
from collections.abc import Sequence

from fusefs.core.document import Source
from fusefs.core.errors import BadConfig, Problem
from fusefs.core.names import printable
from fusefs.core.plan import Rule
from fusefs.core.planread import World, read_plan
from fusefs.linux.configfiles import config_dir, distrust, is_drop_in, read_source, unreadable

_HERE = b"plan.d"
_ID_MAX = (1 << 32) - 2
"""The number after that means nobody."""


def plan_dir() -> bytes | None:
    """Where this user's rules are: /etc/trashd/plan.d for root; None for somebody without a home."""
    above = config_dir()
    return None if above is None else os.path.join(above, _HERE)


def load_plan(paths: Sequence[bytes], now_ns: int, *, is_trusting: bool) -> tuple[Rule, ...]:
    """The rules in files, and in the drop-ins in directories, sorted by name.

    now_ns       from when ages are counted
    is_trusting  whoever the files belong to: a draft is looked at before it is installed
    Raises       BadConfig with all that is wrong in any of them
    """
    sources: list[Source] = []
    problems: list[Problem] = []
    for path in paths:
        try:
            files = _files(path, is_trusting=is_trusting)
        except OSError as error:
            problems.append(unreadable(path, error))
            continue
        except BadConfig as error:
            problems += error.problems
            continue
        for file in files:
            try:
                sources.append(read_source(file, is_trusting=is_trusting))
            except BadConfig as error:
                problems += error.problems
    rules: tuple[Rule, ...] = ()
    try:
        rules = read_plan(sources, World(now_ns, time.mktime, uid_of, gid_of))
    except BadConfig as error:
        problems += error.problems
    if problems:
        raise BadConfig(problems=tuple(problems))
    return rules


def _files(path: bytes, *, is_trusting: bool) -> list[bytes]:
    """A file itself, or the drop-ins in a directory. Raises  OSError, BadConfig"""
    try:
        names = sorted(os.listdir(path))
    except NotADirectoryError:
        return [path]
    if not is_trusting and (problems := tuple(distrust(path, os.stat(path)))):
        raise BadConfig(problems=problems)
    return [os.path.join(path, name) for name in names if is_drop_in(name)]


def uid_of(text: str) -> int:
    """A user's number, by name or number. Raises  ValueError with a message: there is none"""
    if _is_id(text):
        return int(text)
    try:
        return pwd.getpwnam(text).pw_uid
    except KeyError as error:
        raise ValueError(f"there is no user {printable(os.fsencode(text))}") from error


def gid_of(text: str) -> int:
    """The same for a group."""
    if _is_id(text):
        return int(text)
    try:
        return grp.getgrnam(text).gr_gid
    except KeyError as error:
        raise ValueError(f"there is no group {printable(os.fsencode(text))}") from error


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 10 and int(text) <= _ID_MAX
