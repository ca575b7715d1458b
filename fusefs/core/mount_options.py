"""Mount options: one table defines the command line's options and the words of `-o`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from fusefs.core.errors import UsageError
from fusefs.core.human_units import parse_size
from fusefs.core.uring_choice import FastPath


class Coherence(Enum):
    """Whether the backing tree is changed other than through the mount.

    EXCLUSIVE  never, since all access is through the mount
    SHARED     at any time, so the kernel's caches expire soon
    """

    EXCLUSIVE = "exclusive"
    SHARED = "shared"


class BackingSpeed(Enum):
    """How quickly the backing filesystem responds.

    AUTO   according to its type and its measured latency
    LOCAL  at once, so operations need not run in parallel
    SLOW   after some time, as over a network: operations run in parallel, and listings prefetch attributes
    """

    AUTO = "auto"
    LOCAL = "local"
    SLOW = "slow"


class PassthroughMode(Enum):
    """Whether reads and writes bypass the daemon.

    AUTO  where possible
    ON    always; if that is impossible, the mount fails
    OFF   never
    """

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class EngineMode(Enum):
    """Which part of the daemon answers requests.

    AUTO   the engine, or pyfuse3 if the engine is not available
    PLAIN  pyfuse3's handlers: slower, with fewer features
    """

    AUTO = "auto"
    PLAIN = "plain"


class UringMode(Enum):
    """Whether requests arrive through io_uring, with a queue for each core.

    AUTO  if the machine's switch is on and the kernel is trusted
    ON    always, on any kernel; if that is impossible, the mount fails. A mount made by root turns the switch on
    OFF   never
    """

    AUTO = "auto"
    ON = "on"
    OFF = "off"


_OneOf = TypeVar("_OneOf", Coherence, BackingSpeed, EngineMode, PassthroughMode, UringMode)

_TIMEOUTS_S = {Coherence.EXCLUSIVE: 3600.0, Coherence.SHARED: 1.0}
"""Exclusive: so long that expiry never matters. Shared: about the time after which people check again."""
_TIMEOUT_MAX_S = 1e9
_CACHE_BYTES = 64 << 20
"""Names and attributes of about 90,000 files, at 700 bytes each (measured)."""
_CACHE_BYTES_MAX = 64 << 30
_N_IN_FLIGHT = 64
"""Each request needs a thread. 10,000 entries at 1 ms each take 11.5 s one by one, but 0.55 s with 64 (measured)."""
_N_IN_FLIGHT_MAX = 1024

_FLAGS = {
    "ro": "rw", "nosuid": "suid", "nodev": "dev", "noexec": "exec", "sync": "async", "dirsync": "",
    "nosymfollow": "symfollow",
}  # fmt: skip
"""The kernel's mount flags, each with the word that clears it."""
_OPPOSITES = {opposite: flag for flag, opposite in _FLAGS.items() if opposite}

_NOT_OURS = frozenset({
    "_netdev", "atime", "auto", "defaults", "diratime", "group", "iversion", "lazytime", "loud", "mand", "noauto",
    "nofail", "noiversion", "nolazytime", "nomand", "nonempty", "norelatime", "nostrictatime", "nouser", "nousers",
    "owner", "relatime", "silent", "strictatime", "user", "users",
})  # fmt: skip
"""Words for mount(8), systemd and libfuse that may be on the same fstab line; they are ignored here."""
_NOT_OURS_PREFIXES = ("x-", "X-", "comment=", "fsname=", "helper=", "subtype=", "uhelper=", "user=")

_KERNEL_FUSE_PREFIXES = ("user_id=", "group_id=", "rootmode=", "max_read=", "blksize=")

_REFUSED = {
    "remount": "mount -o remount,ro MNT changes the kernel's own flags; for other options, unmount and mount again",
    "auto_unmount": "a mount whose daemon died stays in place, since backup and cleanup programs would mistake an "
    "empty directory for the real one; trashd mount --replace restarts such a mount",
    "allow_root": "use allow_other, which includes root",
}

_ACCESS_TIMES = "the mount options of the backing filesystem determine whether access times are updated"
_WITHOUT_EFFECT: Final = {
    "noatime": _ACCESS_TIMES,
    "nodiratime": _ACCESS_TIMES,
    **dict.fromkeys(("without=seam", "without=direct-requests", "without=native-core"), "use engine=plain"),
    "without=uring": "use uring=off",
    "without=passthrough": "use passthrough=off",
    **dict.fromkeys(
        ("without=parallel-lookups", "without=kept-listings", "without=kept-root-acl", "without=unopened-directories",
         "without=kept-links", "without=kill-privileges"),
        "the mount uses this feature where possible; engine=plain disables it",
    ),
}  # fmt: skip
"""Words of mount(8) and earlier versions that have no effect; they are accepted so that an fstab with them works."""


@dataclass(frozen=True, slots=True)
class MountOptions:
    """The settings of a mount.

    timeout_s            how long the kernel and the daemon together may cache names, negative entries and attributes
    cache_bytes          memory for the daemon's metadata cache of a slow backing filesystem; 0: no cache
    has_xattrs           extended attributes, and thus ACLs, are available
    n_in_flight          maximum number of concurrent requests to a slow backing filesystem
    show_trash           a listing of the root directory contains `.trashd`
    allow_other          users other than the one who mounts may use the mount
    default_permissions  the kernel checks permissions; otherwise the backing filesystem checks those of the daemon
    flags                the kernel's flags that are set, with mount(8)'s names
    """

    coherence: Coherence
    timeout_s: float
    cache_bytes: int
    has_xattrs: bool
    backing: BackingSpeed
    n_in_flight: int
    engine: EngineMode
    passthrough: PassthroughMode
    uring: UringMode
    show_trash: bool
    allow_other: bool
    default_permissions: bool
    flags: frozenset[str]

    def disabled_fast_paths(self) -> dict[FastPath, str]:
        """Return the fast paths that are switched off, each with the option that switches it off."""
        off = {}
        if self.engine is EngineMode.PLAIN:
            off[FastPath.ENGINE] = "engine=plain"
        if self.passthrough is PassthroughMode.OFF:
            off[FastPath.PASSTHROUGH] = "passthrough=off"
        if self.uring is UringMode.OFF:
            off[FastPath.URING] = "uring=off"
        return off


def _one_of(kind: Iterable[_OneOf], word: str) -> _OneOf:
    by_value = {one.value: one for one in kind}
    try:
        return by_value[word.partition("=")[2]]
    except KeyError as error:
        raise UsageError(f"invalid value in {word}", f"write one of {', '.join(by_value)}") from error


def _seconds(word: str) -> float:
    try:
        seconds = float(word.partition("=")[2])
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= _TIMEOUT_MAX_S:
        raise UsageError(f"invalid value in {word}", "write a number of seconds, such as 0.5")
    return seconds


def _size(word: str) -> int:
    try:
        size_bytes = parse_size(word.partition("=")[2])
    except ValueError as error:
        raise UsageError(f"invalid value in {word}", "write a size, such as 64M, or 0 for no cache") from error
    if size_bytes > _CACHE_BYTES_MAX:
        raise UsageError(
            f"the size in {word} is too large",
            f"write at most {_CACHE_BYTES_MAX >> 30}G: the cache is held in this machine's memory",
        )
    return size_bytes


def _number(word: str) -> int:
    text = word.partition("=")[2]
    number = int(text) if re.fullmatch("[0-9]{1,9}", text, re.ASCII) else 0
    if not 1 <= number <= _N_IN_FLIGHT_MAX:
        raise UsageError(f"invalid value in {word}", f"write a number of requests, from 1 to {_N_IN_FLIGHT_MAX}")
    return number


class MountOption(NamedTuple):
    """A word of `-o`, and the command line's option for it: `cache_size=64M` is `--cache-size 64M`.

    field    the field of MountOptions that it sets; a switch inverts the default
    default  the default value; None if it depends on other options
    read     converts a whole word, such as `cache_size=64M`, or raises UsageError; None if the option is a switch
    value    the possible values after the `=`, for hints
    metavar  the possible values as the help shows them, if different
    help     empty if the command line has no option for it
    is_documented  whether the help and the manual page list it among the words of `-o`
    """

    name: str
    field: str
    default: Any
    read: Callable[[str], Any] | None = None
    value: str = ""
    help: str = ""
    metavar: str = ""
    is_documented: bool = True

    def word(self, value: str = "") -> str:
        """Return the word for `-o`, such as `cache_size=64M` or `no_xattr`."""
        return f"{self.name}={value}" if self.read else self.name

    def switch(self) -> str:
        """Return the command line's option, such as `--cache-size`."""
        return "--" + self.name.replace("_", "-")


def _choices(kind: type[_OneOf]) -> str:
    return "|".join(one.value for one in kind)


_OF_ANSWERS: Final = (
    MountOption(
        "coherence", "coherence", None, partial(_one_of, Coherence), _choices(Coherence),
        "Whether SRC changes only through the mount (exclusive) or also directly (shared). "
        "[default: exclusive if the mount covers SRC, otherwise shared]",
    ),
    MountOption(
        "timeout", "timeout_s", None, _seconds, "SECONDS",
        "Cache names and attributes for S seconds. "
        f"[default: {_TIMEOUTS_S[Coherence.SHARED]:g}, or {_TIMEOUTS_S[Coherence.EXCLUSIVE]:g} if exclusive]",
        metavar="S",
    ),
    MountOption(
        "cache_size", "cache_bytes", _CACHE_BYTES, _size, "SIZE",
        f"Memory for the daemon's cache if SRC is slow; 0 for no cache. [default: {_CACHE_BYTES >> 20}M]",
    ),
    MountOption(
        "no_xattr", "has_xattrs", True,
        help="Do not serve extended attributes and ACLs, to save requests.",
    ),
    MountOption(
        "backing", "backing", BackingSpeed.AUTO, partial(_one_of, BackingSpeed), _choices(BackingSpeed),
        "Whether SRC responds quickly (local), or slowly as over a network (slow). [default: auto]",
    ),
    MountOption(
        "in_flight", "n_in_flight", _N_IN_FLIGHT, _number, "N",
        f"Send at most N parallel requests to a slow SRC, 1 to {_N_IN_FLIGHT_MAX}. [default: {_N_IN_FLIGHT}]",
    ),
    MountOption("engine", "engine", EngineMode.AUTO, partial(_one_of, EngineMode), _choices(EngineMode)),
    MountOption(
        "passthrough", "passthrough", PassthroughMode.AUTO, partial(_one_of, PassthroughMode),
        _choices(PassthroughMode),
        "Let reads and writes bypass the daemon; with on, fail if that is impossible. [default: auto]",
    ),
    MountOption(
        "uring", "uring", UringMode.AUTO, partial(_one_of, UringMode), _choices(UringMode),
        "Exchange requests with the kernel through io_uring; with on, fail if that is impossible. [default: auto]",
    ),
)  # fmt: skip
_OF_ACCESS: Final = (
    MountOption("show_trash", "show_trash", False, help="Show .trashd in listings of the root directory of the mount."),
    MountOption("allow_other", "allow_other", None),
    MountOption("default_permissions", "default_permissions", False, is_documented=False),
)
OPTIONS: Final = _OF_ANSWERS + _OF_ACCESS
"""The options in the order in which hints list their words, for `trashd mount` and mount(8)'s helper."""
LISTED: Final = _OF_ACCESS + _OF_ANSWERS
"""The options in the order of the help."""
_BY_NAME: Final = {option.name: option for option in OPTIONS}


def parse_options(
    texts: Iterable[str], *, as_root: bool, is_sloppy: bool = False, default_coherence: Coherence
) -> MountOptions:
    """Parse the texts of all `-o` options; a later word overrides an earlier one.

    as_root    whether root makes the mount; by default, root's mounts are for all users, others only for their maker
    is_sloppy  ignore unknown words
    default_coherence  the coherence if no word sets it
    Raises     UsageError
    """
    values = {option.field: option.default for option in OPTIONS} | {
        "coherence": default_coherence,
        "allow_other": as_root,
    }
    flags: set[str] = set()
    for word in _split_words(texts):
        key, has_value, _ = word.partition("=")
        option = _BY_NAME.get(key)
        if word in _WITHOUT_EFFECT:
            continue
        if option is not None and option.read is not None:
            values[option.field] = option.read(word)
        elif option is not None and not has_value:
            values[option.field] = not option.default
        elif word in _FLAGS:
            flags.add(word)
        elif word in _OPPOSITES:
            flags.discard(_OPPOSITES[word])
        elif word in _REFUSED:
            raise UsageError(f"trashd mount does not support the option {word}", _REFUSED[word])
        elif word not in _NOT_OURS and not word.startswith(_NOT_OURS_PREFIXES) and not is_sloppy:
            has_unwanted_value = has_value and (option is not None or key in _FLAGS)
            reason = f"the option {key} takes no value" if has_unwanted_value else f"unknown option {word}"
            ours = ", ".join(option.word(option.value) for option in OPTIONS if option.is_documented)
            raise UsageError(reason, f"the options are {ours}, and from mount(8): {', '.join(sorted(_FLAGS))}")
    if values["timeout_s"] is None:
        values["timeout_s"] = _TIMEOUTS_S[values["coherence"]]
    # Without the kernel's checks, all users would have the daemon's permissions.
    values["default_permissions"] |= values["allow_other"]
    options = MountOptions(**values, flags=frozenset(flags))
    for word in ("passthrough=on", "uring=on"):
        field = word.partition("=")[0]
        if options.engine is EngineMode.PLAIN and getattr(options, field).value == "on":
            raise UsageError(f"{word} and engine=plain can't be combined")
    return options


def find_without_effect(texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Return the words of all `-o` options that are accepted and ignored, each with a reason or a replacement."""
    return ((word, _WITHOUT_EFFECT[word]) for word in _split_words(texts) if word in _WITHOUT_EFFECT)


def flags_after(texts: Sequence[str], flags: frozenset[str], *, is_sloppy: bool = False) -> frozenset[str] | None:
    """Return the kernel's flags after `-o remount,…`, or None if `remount` is not among the words.

    flags    the present flags. Other words, which mount(8) adds from fstab or from the kernel's mount list, are ignored
    Raises  UsageError
    """
    words = list(_split_words(texts))
    if "remount" not in words:
        return None
    words = [word for word in words if word != "remount" and not word.startswith(_KERNEL_FUSE_PREFIXES)]
    before = sorted(flag for flag in flags if flag in _FLAGS)
    return parse_options([*before, *words], as_root=True, is_sloppy=is_sloppy, default_coherence=Coherence.SHARED).flags


def _split_words(texts: Iterable[str]) -> Iterator[str]:
    return (word for text in texts for word in re.findall(r'(?:[^,"]|"[^"]*"?)+', text))
