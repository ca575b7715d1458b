"""What users' registries name, for root: each read by a child with its user's uid, reached through no link of theirs.

Root hears of a user from the accounts, and of one whom these don't list from a folder in a store. A registry is
looked for below the home that the accounts tell, since no other $XDG_STATE_HOME is told to root.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from fusefs.linux.act_as_user import person
from fusefs.linux.answer_timeout import ask_each
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import Mount, covering
from fusefs.linux.runtime_directories import STATE_BELOW_HOME
from fusefs.linux.untrusted_path import open_way
from fusefs.store.registry_lines import STORES, decode, read_registry
from fusefs.store.registry_targets import LineOf, RegistryTarget, follow

MOST_ACCOUNTS = 10_000
_MOST_UNLISTED = 1000
_FOUND = b"found"


class _RegistryHome(NamedTuple):
    uid: int
    path: bytes


def stores_of_users(kernel: Kernel, mounts: Sequence[Mount], uids: Iterable[int] = ()) -> Iterator[LineOf]:
    """The lines of all users' registries that lead somewhere now; needs root.

    uids  of users that may be missing in the accounts' list, as a directory service need not list all
    No child is waited for beyond a few seconds: a user who keeps it from answering is passed over.
    """
    homes = _homes(kernel, uids)
    words = [word for home in _with_registry(kernel, homes, mounts) for word in _words_of(kernel, home, mounts)]
    yield from (word for word, lead in follow(kernel, words, mounts) if lead is RegistryTarget.THERE)


def _homes(kernel: Kernel, uids: Iterable[int]) -> list[_RegistryHome]:
    """Where the system says that users are at home, in time: a directory service may be far away."""

    def ask(uid: int | None) -> bytes:
        with suppress(KeyError):
            known = islice(pwd.getpwall(), MOST_ACCOUNTS) if uid is None else (pwd.getpwuid(uid),)
            return b"\0".join(b"%d:%s" % (one.pw_uid, os.fsencode(one.pw_dir)) for one in known)
        return b""

    def homes_of(asked: Sequence[int | None]) -> dict[int, bytes]:
        answers = (answer or b"" for _uid, answer in ask_each(asked, ask, kernel.silent, lambda _uid: pwd.__name__))
        pairs = (one.partition(b":") for answer in answers for one in answer.split(b"\0") if one)
        return {int(uid): path for uid, _colon, path in pairs}

    homes = homes_of((None,))
    homes |= homes_of([*islice((uid for uid in sorted(uids) if uid not in homes), _MOST_UNLISTED)])
    return [_RegistryHome(uid, path) for uid, path in homes.items() if uid != 0 and path.startswith(b"/")]


def _with_registry(kernel: Kernel, homes: Sequence[_RegistryHome], mounts: Sequence[Mount]) -> list[_RegistryHome]:
    """Those where there seems to be a registry: most accounts have none, and cost a few calls."""

    def ask(home: _RegistryHome) -> bytes:
        try:
            with _open_place(kernel, home, mounts) as directory:
                st = os.stat(STORES, dir_fd=directory, follow_symlinks=False)
        except PermissionError:
            return _FOUND  # root of another host may not look; its user's process does
        except OSError:
            return b""
        return _FOUND if stat.S_ISREG(st.st_mode) and st.st_uid == home.uid else b""

    asked = ask_each(homes, ask, kernel.silent, lambda home: covering(home.path, mounts))
    return [home for home, answer in asked if answer == _FOUND]


def _words_of(kernel: Kernel, home: _RegistryHome, mounts: Sequence[Mount]) -> list[LineOf]:
    """What a user's registry says, read as that user."""

    def ask(_home: _RegistryHome) -> bytes:
        try:
            with (
                _open_place(kernel, home, mounts) as place,
                Fd(os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=place)) as directory,
            ):
                return read_registry(directory)
        except OSError:
            return b""

    # A user who stops the child has not made a mount silent: what is learnt of it is that user's alone.
    ((_home, answer),) = ask_each((home,), ask, set(), lambda _home: home.uid, person(home.uid))
    return [LineOf(home.uid, line) for line in decode(answer or b"")]


def _open_place(kernel: Kernel, home: _RegistryHome, mounts: Sequence[Mount]) -> Fd:
    """The directory of a user's registry, through no link but root's, for any caller. Raises  OSError"""
    return open_way(kernel, os.path.join(home.path, STATE_BELOW_HOME), mounts, (0,))
