"""Credentials to act with: users, root with or without capabilities, single capabilities, roots of user namespaces."""

import ctypes
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from fusefs.linux.credentials import Capability
from tests.support.foreground_mount import SHARED_LIMIT_S, trashd_mount
from tests.support.other_users import become
from tests.support.real_filesystems import volume_of

_CLONE_NEWUSER = 0x1000_0000
_PR_SET_DUMPABLE, _PR_SET_KEEPCAPS = 4, 8
_CAP_VERSION_3 = 0x20080522
_CAP_MKNOD = 27

_libc = ctypes.CDLL(None, use_errno=True)

HE, MATE, STRANGER, OTHERS = 72_001, 72_002, 72_003, 72_004
TEAM = 72_100
ROOT_IN_THERE = 73_000
OURS = (1000, 72_000, 1000)
"""A user namespace's map that knows all of them: first id in there, first id here, how many."""


class Credentials(NamedTuple):
    """The credentials that a process can have."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()
    capability: int | None = None  # the one that it has
    is_capable: bool = False  # it has all
    maps: tuple[tuple[int, int, int], ...] = ()  # of the user namespace whose root it is

    def named(self, outside: int) -> int:
        """An id of ours as these credentials map it; an unmapped id can't be used."""
        for inside, first, n in self.maps:
            if first <= outside < first + n:
                return inside + outside - first
        return outside

    def has(self, uid: int) -> bool:
        """Whether an id is one of these: the own one, or one in the user namespace."""
        return uid == self.uid or any(first <= uid < first + n for _, first, n in self.maps)

    def be(self) -> None:
        """Give this process, root's, these credentials for good. Raises  OSError"""
        if self.maps:
            _enter_namespace(self)
        elif self.capability is not None:
            _keep_only(self, self.capability)
        elif not self.is_capable:
            become(self.uid, self.gid, self.groups)

    @property
    def is_plain(self) -> bool:
        """Whether his ids say all that he may."""
        return self.uid != 0 and not self.maps and self.capability is None and not self.is_capable

    @contextmanager
    def assume_ids(self) -> Iterator[None]:
        """Have this process, root's, open files with the rights of this plain user in the block, without a fork."""
        assert self.is_plain
        groups = os.getgroups()
        os.setgroups(self.groups)
        os.setresgid(-1, self.gid, -1)
        os.setresuid(-1, self.uid, -1)
        try:
            yield
        finally:
            os.setresuid(-1, 0, -1)
            os.setresgid(-1, 0, -1)
            os.setgroups(groups)
            _set_dumpable()


PEOPLE: Mapping[str, Credentials] = MappingProxyType(
    {
        "owner": Credentials(HE, HE),
        "owner in the team": Credentials(HE, HE, (TEAM,)),
        "team": Credentials(MATE, TEAM),
        "team besides": Credentials(MATE, MATE, (OTHERS, TEAM)),
        "stranger": Credentials(STRANGER, STRANGER),
        "root": Credentials(0, 0, is_capable=True),
        "root without capabilities": Credentials(0, 0),
        "root of all of us": Credentials(ROOT_IN_THERE, ROOT_IN_THERE, maps=((0, ROOT_IN_THERE, 1), OURS)),
        "root of himself": Credentials(HE, HE, maps=((0, HE, 1),)),
        "root of others": Credentials(ROOT_IN_THERE, ROOT_IN_THERE, maps=((0, ROOT_IN_THERE, 1), (1000, 74_000, 1000))),
        "stranger with CHOWN": Credentials(STRANGER, STRANGER, capability=Capability.CHOWN),
        "stranger with DAC_OVERRIDE": Credentials(STRANGER, STRANGER, capability=Capability.DAC_OVERRIDE),
        "stranger with DAC_READ_SEARCH": Credentials(STRANGER, STRANGER, capability=Capability.DAC_READ_SEARCH),
        "stranger with FOWNER": Credentials(STRANGER, STRANGER, capability=Capability.FOWNER),
        "owner with FSETID": Credentials(HE, HE, capability=Capability.FSETID),
        "team with FSETID": Credentials(MATE, TEAM, capability=Capability.FSETID),
        "owner with SYS_ADMIN": Credentials(HE, HE, capability=Capability.SYS_ADMIN),
        "owner with MKNOD": Credentials(HE, HE, capability=_CAP_MKNOD),
        "owner with SETFCAP": Credentials(HE, HE, capability=Capability.SETFCAP),
    }
)


def _enter_namespace(person: Credentials) -> None:
    """Be root of a new user namespace; a process that stays outside for a moment writes its maps."""
    ready, go = os.pipe(), os.pipe()
    own = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            os.read(ready[0], 1)
            text = "".join(f"{inside} {first} {n}\n" for inside, first, n in person.maps)
            for name in ("uid_map", "gid_map"):
                Path(f"/proc/{own}/{name}").write_text(text)
            os.write(go[1], b".")
        finally:
            os._exit(0)
    os.setgroups(person.groups)
    os.setresgid(person.gid, person.gid, person.gid)
    os.setresuid(person.uid, person.uid, person.uid)
    _checked(_libc.unshare(_CLONE_NEWUSER))
    os.write(ready[1], b".")
    os.close(go[1])
    assert os.read(go[0], 1), "no map"
    os.waitpid(pid, 0)
    for fd in (*ready, go[0]):
        os.close(fd)
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    _set_dumpable()


def _keep_only(person: Credentials, capability: int) -> None:
    _checked(_libc.prctl(_PR_SET_KEEPCAPS, ctypes.c_ulong(1), 0, 0, 0))
    os.setgroups(person.groups)
    os.setresgid(person.gid, person.gid, person.gid)
    os.setresuid(person.uid, person.uid, person.uid)
    low, high = 1 << capability & 0xFFFF_FFFF, 1 << capability >> 32
    header, sets = struct.pack("=Ii", _CAP_VERSION_3, 0), struct.pack("=6I", low, low, 0, high, high, 0)
    _checked(_libc.capset(header, sets))
    _set_dumpable()


def _set_dumpable() -> None:
    """Let this process open the entries of its own /proc/self again, as after a login; a change of ids forbids it."""
    _checked(_libc.prctl(_PR_SET_DUMPABLE, ctypes.c_ulong(1), 0, 0, 0))


def _checked(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


FIRST, N_MAPPED = 720_000, 1000
WAYS = ("native", "exclusive", "shared", "slow")
"""A plain directory, and mounts of which nothing but what reaches them is new for an hour."""


@contextmanager
def mount_and_behind(way: str, *options: str) -> Iterator[tuple[Path, Path]]:
    """Make a directory for all users; yield its path through the mount and its backing path.

    way      one of WAYS, or "opened": the kernel opens directories by requests, as of an overlayfs
    options  more of the mount's
    """
    with volume_of("overlay" if way == "opened" else "ext4") as volume:
        source = volume / "source"
        source.mkdir()
        source.chmod(0o777)
        if way == "native":
            yield source, source
            return
        coherence = "shared" if way == "shared" else "exclusive"
        backing = "slow" if way == "slow" else "local"
        own = [f"coherence={coherence}", "timeout=3600", f"backing={backing}"]
        with trashd_mount(source, options=[*own, *options], limit_s=SHARED_LIMIT_S) as mounted:
            yield mounted.path, source


def in_child(act: Callable[[], object], become: Callable[[], None]) -> int:
    """The errno of an act by a process that has become a user before."""
    pid = os.fork()
    if pid == 0:
        code = 255
        try:
            become()
            act()
            code = 0
        except OSError as error:
            code = error.errno or 255
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def keep_only(capability: Capability) -> None:
    Credentials(HE, HE, capability=capability).be()


def as_root_in_there() -> None:
    """Root of a user namespace that knows a thousand users, as one of rootless containers."""
    Credentials(FIRST, FIRST, maps=((0, FIRST, N_MAPPED),)).be()
