"""What a mount can be told: the words of `-o`, as a value."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from fusefs.core.errors import UsageError


class Coherence(Enum):
    """Who else changes the backing tree.

    EXCLUSIVE  nobody: all who use it go through the mount
    SHARED     anybody, at any time: what the kernel remembers soon grows old
    """

    EXCLUSIVE = "exclusive"
    SHARED = "shared"


_TIMEOUTS_S = {Coherence.EXCLUSIVE: 3600.0, Coherence.SHARED: 1.0}
"""Long enough that time plays no part; as long as people take to look again."""
_TIMEOUT_MAX_S = 1e9

_FLAGS = {
    "ro": "rw", "nosuid": "suid", "nodev": "dev", "noexec": "exec", "noatime": "atime", "nodiratime": "diratime",
    "sync": "async", "dirsync": "", "nosymfollow": "symfollow",
}  # fmt: skip
"""The kernel's flags for a mount, and what takes each back."""
_OPPOSITES = {opposite: flag for flag, opposite in _FLAGS.items() if opposite}

_NOT_OURS = frozenset({
    "_netdev", "auto", "defaults", "group", "iversion", "lazytime", "loud", "mand", "noauto", "nofail", "noiversion",
    "nolazytime", "nomand", "nonempty", "norelatime", "nostrictatime", "nouser", "nousers", "owner", "relatime",
    "silent", "strictatime", "user", "users",
})  # fmt: skip
"""Words for mount(8), systemd and libfuse, which may stand in the same line of fstab."""
_NOT_OURS_PREFIXES = ("x-", "X-", "comment=", "fsname=", "helper=", "subtype=", "uhelper=", "user=")

_REFUSED = {
    "remount": "a mount keeps its options; the kernel's own flags change with: mount -i -o remount,bind,ro MNT",
    "auto_unmount": "a mount whose daemon died stays, dead: an empty directory in its place would be taken for the "
    "truth by whoever copies or cleans up; `trashd mount --replace` brings it back",
    "allow_root": "allow_other lets root in too",
}
_OURS = ("coherence=exclusive|shared", "timeout=SECONDS", "show_trash", "allow_other", "default_permissions")


@dataclass(frozen=True, slots=True)
class Options:
    """How to mount.

    timeout_s            how long the kernel may believe names and attributes
    show_trash           `.trashd` is in the listing of the root
    allow_other          users other than the one who mounts may use it
    default_permissions  the kernel checks permissions, not the filesystem below with the daemon's own
    flags                the kernel's flags that are on, by mount(8)'s names
    """

    coherence: Coherence
    timeout_s: float
    show_trash: bool = False
    allow_other: bool = False
    default_permissions: bool = False
    flags: frozenset[str] = frozenset()


def parse_options(texts: Iterable[str], *, as_root: bool, is_sloppy: bool = False, usual: Coherence) -> Options:
    """Read the texts of all `-o`; the last word wins.

    as_root    root mounts for everybody, others for themselves
    is_sloppy  pass over words that nobody knows
    usual      the coherence if nothing is said of it
    Raises     UsageError
    """
    coherence, timeout_s = usual, None
    switches = {"show_trash": False, "allow_other": as_root, "default_permissions": False}
    flags = set()
    for word in (word for text in texts for word in re.findall(r'(?:[^,"]|"[^"]*"?)+', text)):
        key, has_value, value = word.partition("=")
        if key == "coherence":
            coherence = _coherence(value)
        elif key == "timeout":
            timeout_s = _seconds(value)
        elif word in switches:
            switches[word] = True
        elif word in _FLAGS:
            flags.add(word)
        elif word in _OPPOSITES:
            flags.discard(_OPPOSITES[word])
        elif word in _REFUSED:
            raise UsageError(f"the option {word} is not for trashd", _REFUSED[word])
        elif word not in _NOT_OURS and not word.startswith(_NOT_OURS_PREFIXES) and not is_sloppy:
            takes_none = has_value and (key in switches or key in _FLAGS)
            reason = f"the option {key} takes no value" if takes_none else f"there is no option {word}"
            raise UsageError(reason, f"there are {', '.join(_OURS)}, and mount(8)'s {', '.join(sorted(_FLAGS))}")
    # Without the kernel's checks the daemon's permissions would be everybody's.
    switches["default_permissions"] |= switches["allow_other"]
    return Options(
        coherence, _TIMEOUTS_S[coherence] if timeout_s is None else timeout_s, flags=frozenset(flags), **switches
    )


def _coherence(text: str) -> Coherence:
    try:
        return Coherence(text)
    except ValueError as error:
        raise UsageError(f"coherence={text}", f"it is one of {', '.join(one.value for one in Coherence)}") from error


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= _TIMEOUT_MAX_S:
        raise UsageError(f"timeout={text}", "it is a number of seconds, such as 0.5")
    return seconds
