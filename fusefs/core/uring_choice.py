"""Explains to people why a mount's requests do not use io_uring, and which fast paths a mount uses."""

from __future__ import annotations

import errno
import re
from enum import Enum
from typing import Final, NamedTuple

import msgspec

from fusefs.core.errors import TrashdError

SWITCH: Final = "/sys/module/fuse/parameters/enable_uring"
"""The machine's switch for the FUSE mounts of all users."""
_SINCE = (6, 14)
_TRUSTED_PATCHES = {(6, 18): 42, (7, 1): 6}
"""For each kernel series, the first release with the fixes for bugs that end a mount or block it for ever."""
_TRUSTED_SINCE = (7, 2)
_RELEASE = re.compile(r"([0-9]+)\.([0-9]+)(?:\.([0-9]+))?", re.ASCII)
_DISABLED_FOR_ALL, _GROUP_ONLY = 2, 1


class UringFacts(NamedTuple):
    """What the machine allows this process to do.

    release     the kernel release, from uname(2)
    is_enabled  whether SWITCH is on; None: the kernel has no such switch
    refusal     the errno of io_uring_setup(2); 0: it succeeds
    disabled    kernel.io_uring_disabled: 0 means allowed for all, 1 only for root and a group, 2 for nobody
    barred      online cores on which this process can't run
    """

    release: str
    is_enabled: bool | None
    refusal: int
    disabled: int
    barred: frozenset[int]


def find_obstacle(facts: UringFacts, *, trusts_all: bool = True) -> str | None:
    """Return the reason why requests can't use io_uring, or None if no obstacle is known before the first attempt.

    trusts_all  also accept kernels that may have known bugs
    """
    if facts.is_enabled is None:
        if _version(facts.release)[0] < _SINCE:
            return f"it needs Linux {_SINCE[0]}.{_SINCE[1]} or later, and this is {facts.release}"
        return f"this kernel was built without CONFIG_FUSE_IO_URING: {SWITCH} does not exist"
    if not facts.is_enabled:
        return (
            f"{SWITCH} is N, which applies to all FUSE mounts on this machine; root can enable it with "
            "`trashd service install --uring`, or by mounting with uring=on"
        )
    if not trusts_all and (faults := known_faults(facts.release)):
        return faults
    if facts.refusal:
        return _describe_refusal(facts)
    if facts.barred:
        some = ", ".join(map(str, sorted(facts.barred)[:3])) + (", …" if len(facts.barred) > 3 else "")
        cores = "core" if len(facts.barred) == 1 else "cores"
        return f"a cpuset or CPU affinity keeps the daemon off {cores} {some}, so it could not serve programs there"
    return None


def known_faults(release: str) -> str | None:
    """Describe the bugs that a kernel may have, judging by its release, or return None if it is known to have none.

    A distribution may have fixed an older kernel; the release doesn't show that.
    Source  docs/internals/decisions/0060
    """
    major_minor, patch = _version(release)
    if major_minor >= _TRUSTED_SINCE or patch >= _TRUSTED_PATCHES.get(major_minor, patch + 1):
        return None
    fixed_releases = ", ".join(f"{major}.{minor}.{patch}" for (major, minor), patch in _TRUSTED_PATCHES.items())
    since = f"{_TRUSTED_SINCE[0]}.{_TRUSTED_SINCE[1]}"
    return f"Linux {release} may have bugs in FUSE over io_uring that are fixed in {fixed_releases} and {since}"


def _version(release: str) -> tuple[tuple[int, int], int]:
    match = _RELEASE.match(release)
    major, minor, patch = map(int, match.groups("0")) if match else (0, 0, 0)
    return (major, minor), patch


def _describe_refusal(facts: UringFacts) -> str:
    if facts.disabled == _DISABLED_FOR_ALL:
        return "io_uring is disabled: kernel.io_uring_disabled is 2"
    if facts.refusal == errno.EPERM and facts.disabled == _GROUP_ONLY:
        return "kernel.io_uring_disabled is 1: only root and the group kernel.io_uring_group may use io_uring"
    name = errno.errorcode.get(facts.refusal, str(facts.refusal))
    if facts.refusal in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        return f"a container or a systemd unit denies io_uring, for example with a seccomp filter: {name}"
    hint = "; the limit on locked memory may be too low (ulimit -l)" if facts.refusal == errno.ENOMEM else ""
    return f"io_uring is not available: {name}{hint}"


class FastPath(Enum):
    """The fast paths, with their public names. In plain mode, there is no engine, and the others are off, too."""

    ENGINE = "engine"
    URING = "uring"
    PASSTHROUGH = "passthrough"
    LISTINGS = "kept-listings"


FAST_PATH_EFFECTS: Final = {
    FastPath.ENGINE: "requests are answered by C code",
    FastPath.URING: "requests arrive through io_uring, in a thread on the caller's core",
    FastPath.PASSTHROUGH: "reads, writes and mmap use the backing file directly, without the daemon",
    FastPath.LISTINGS: "the kernel lists an unchanged directory without a request",
}
"""The effect of each fast path when nothing limits it."""
SLOW_BACKING: Final = "SRC is slow: Python code answers from its cache, and threads fetch the rest"
"""How the engine is limited if the backing filesystem is slow."""


class FastPathState(msgspec.Struct, frozen=True):
    """Whether a mount uses a fast path. why: what the fast path does, what limits it, or why it is off"""

    name: str
    is_on: bool
    why: str


class FastPathReport(msgspec.Struct, frozen=True):
    """The report from a mount's daemon. device: st_dev of the mount"""

    device: int
    pid: int
    fast_paths: tuple[FastPathState, ...]


def encode_report(report: FastPathReport) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report)) + b"\n"


def decode_report(text: bytes) -> FastPathReport:
    """Decode what `encode_report` wrote. Raises  TrashdError for anything else"""
    try:
        return msgspec.json.decode(text, type=FastPathReport)
    except (msgspec.MsgspecError, ValueError) as error:
        hint = "its daemon may run another version of trashd; unmount the mount and mount it again"
        raise TrashdError(f"can't determine which fast paths this mount uses ({error})", hint) from error
