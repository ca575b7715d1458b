"""The options of a mount: one table defines the options of the command line and those of `-o`."""

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
    """Whether the backing tree also changes by other ways than through the mount.

    EXCLUSIVE  never: the kernel may cache for long
    SHARED     at any time: cached data expires soon
    """

    EXCLUSIVE = "exclusive"
    SHARED = "shared"


class BackingSpeed(Enum):
    """How fast the backing filesystem answers.

    AUTO   decide by its type and its response times
    LOCAL  at once
    SLOW   over a network: operations wait in parallel, and listings fetch attributes ahead
    """

    AUTO = "auto"
    LOCAL = "local"
    SLOW = "slow"


class PassthroughMode(Enum):
    """Whether reads and writes bypass the daemon.

    AUTO  where possible
    ON    always; otherwise the mount fails
    OFF   never
    """

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class EngineMode(Enum):
    """Which code answers requests.

    AUTO   the engine in C, or pyfuse3 where the engine can't run
    PLAIN  pyfuse3's handlers: slower, with fewer features
    """

    AUTO = "auto"
    PLAIN = "plain"


class UringMode(Enum):
    """Whether requests are transported by io_uring, one queue for each core.

    AUTO  if the machine's switch is set and the kernel has no known faults
    ON    on any kernel, or the mount fails; for root it sets the switch
    OFF   never
    """

    AUTO = "auto"
    ON = "on"
    OFF = "off"


_OneOf = TypeVar("_OneOf", Coherence, BackingSpeed, EngineMode, PassthroughMode, UringMode)

_TIMEOUTS_S = {Coherence.EXCLUSIVE: 3600.0, Coherence.SHARED: 1.0}
"""An hour is long enough that it costs nothing; a second is about the time in which people repeat a command."""
_TIMEOUT_MAX_S = 1e9
_CACHE_BYTES = 64 << 20
"""Names and attributes of some 90,000 files, at 700 bytes each (measured)."""
_CACHE_BYTES_MAX = 64 << 30
_N_IN_FLIGHT = 64
"""Measured with 10,000 entries of 1 ms each: 11.5 s one by one, 0.55 s with 64 threads."""
_N_IN_FLIGHT_MAX = 1024

_FLAGS = {
    "ro": "rw", "nosuid": "suid", "nodev": "dev", "noexec": "exec", "sync": "async", "dirsync": "",
    "nosymfollow": "symfollow",
}  # fmt: skip
"""The kernel's flags for a mount, each with the option that clears it."""
_OPPOSITES = {opposite: flag for flag, opposite in _FLAGS.items() if opposite}

_NOT_OURS = frozenset({
    "_netdev", "atime", "auto", "defaults", "diratime", "group", "iversion", "lazytime", "loud", "mand", "noauto",
    "nofail", "noiversion", "nolazytime", "nomand", "nonempty", "norelatime", "nostrictatime", "nouser", "nousers",
    "owner", "relatime", "silent", "strictatime", "user", "users",
})  # fmt: skip
"""Options for mount(8), systemd and libfuse, which may be in the same line of fstab: they are ignored."""
_NOT_OURS_PREFIXES = ("x-", "X-", "comment=", "fsname=", "helper=", "subtype=", "uhelper=", "user=")

_OF_THE_KERNELS_FUSE = ("user_id=", "group_id=", "rootmode=", "max_read=", "blksize=")

_REFUSED = {
    "remount": "mount -o remount,ro MNT changes the kernel's own flags; other options need a new mount",
    "auto_unmount": "a mount stays when its daemon dies, so that no program mistakes the directory below for the "
    "mount; `trashd mount --replace` restores it",
    "allow_root": "allow_other includes root",
}

_ACCESS_TIMES = "the backing filesystem keeps access times as its own mount options specify"
_WITHOUT_EFFECT: Final = {
    "noatime": _ACCESS_TIMES,
    "nodiratime": _ACCESS_TIMES,
    **dict.fromkeys(("without=seam", "without=direct-requests", "without=native-core"), "use engine=plain"),
    "without=uring": "use uring=off",
    "without=passthrough": "use passthrough=off",
    **dict.fromkeys(
        ("without=parallel-lookups", "without=kept-listings", "without=kept-root-acl", "without=unopened-directories",
         "without=kept-links", "without=kill-privileges"),
        "the mount always uses it where possible; engine=plain never does",
    ),
}  # fmt: skip
"""Options of mount(8) and of earlier versions that are accepted and ignored, so that an old fstab still mounts."""


@dataclass(frozen=True, slots=True)
class MountOptions:
    """The options of one mount.

    timeout_s            how long the kernel and the daemon together may cache names and attributes
    cache_bytes          memory for the daemon's cache of a slow backing filesystem; 0: no cache
    has_xattrs           whether the mount has extended attributes and ACLs
    n_in_flight          parallel requests to a slow backing filesystem
    show_trash           `.trashd` is in the listing of the root
    allow_other          users other than the mounting one may use it
    default_permissions  the kernel checks permissions; otherwise the daemon's own permissions decide
    flags                the kernel's flags that are on, by mount(8)'s names
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

    def off(self) -> dict[FastPath, str]:
        """The fast paths that are off, each with the option that switched it off."""
        off = {}
        if self.engine is EngineMode.PLAIN:
            off[FastPath.ENGINE] = "engine=plain"
        if self.passthrough is PassthroughMode.OFF:
            off[FastPath.PASSTHROUGH] = "passthrough=off"
        if self.uring is UringMode.OFF:
            off[FastPath.URING] = "uring=off"
        return off


def _one_of(those: Iterable[_OneOf], word: str) -> _OneOf:
    by_value = {one.value: one for one in those}
    try:
        return by_value[word.partition("=")[2]]
    except KeyError as error:
        raise UsageError(f"{word}: not one of {', '.join(by_value)}") from error


def _seconds(word: str) -> float:
    try:
        seconds = float(word.partition("=")[2])
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= _TIMEOUT_MAX_S:
        raise UsageError(f"{word}: not a number of seconds, such as 0.5")
    return seconds


def _size(word: str) -> int:
    try:
        size_bytes = parse_size(word.partition("=")[2])
    except ValueError as error:
        raise UsageError(f"{word}: not a size, such as 64M, or 0") from error
    if size_bytes > _CACHE_BYTES_MAX:
        raise UsageError(f"{word}: more than {_CACHE_BYTES_MAX >> 30}G")
    return size_bytes


def _number(word: str) -> int:
    text = word.partition("=")[2]
    number = int(text) if re.fullmatch("[0-9]{1,9}", text, re.ASCII) else 0
    if not 1 <= number <= _N_IN_FLIGHT_MAX:
        raise UsageError(f"{word}: not a number from 1 to {_N_IN_FLIGHT_MAX}")
    return number


class MountOption(NamedTuple):
    """An option of `-o`, and the command line's option for it: `cache_size=64M` is `--cache-size 64M`.

    field    the field of MountOptions that it sets; a switch inverts the default
    default  None: it depends on other options
    read     parses a whole word, `cache_size=64M`; it raises UsageError. None: the option is a switch
    value    the placeholder for the value, in hints
    metavar  the placeholder in the help, if it differs
    help     empty: the command line has no option for it
    is_told  whether help and man page list it among the options of `-o`
    """

    name: str
    field: str
    default: Any
    read: Callable[[str], Any] | None = None
    value: str = ""
    help: str = ""
    metavar: str = ""
    is_told: bool = True

    def word(self, value: str = "") -> str:
        """The option as `-o` takes it: `cache_size=` and a value, or `no_xattr`."""
        return f"{self.name}={value}" if self.read else self.name

    def switch(self) -> str:
        """The command line's option."""
        return "--" + self.name.replace("_", "-")


def _values(kind: type[_OneOf]) -> str:
    return "|".join(one.value for one in kind)


_OF_ANSWERS: Final = (
    MountOption(
        "coherence", "coherence", None, partial(_one_of, Coherence), _values(Coherence),
        "Whether SRC changes only through the mount. [default: shared; exclusive over itself]",
    ),
    MountOption(
        "timeout", "timeout_s", None, _seconds, "SECONDS",
        "Cache names and attributes for S seconds. "
        f"[default: {_TIMEOUTS_S[Coherence.SHARED]:g}; {_TIMEOUTS_S[Coherence.EXCLUSIVE]:g} if exclusive]",
        metavar="S",
    ),
    MountOption(
        "cache_size", "cache_bytes", _CACHE_BYTES, _size, "SIZE",
        f"Memory for the daemon's cache of a slow SRC; 0 for none. [default: {_CACHE_BYTES >> 20}M]",
    ),
    MountOption(
        "no_xattr", "has_xattrs", True,
        help="Serve no extended attributes and no ACLs, to save requests.",
    ),
    MountOption(
        "backing", "backing", BackingSpeed.AUTO, partial(_one_of, BackingSpeed), _values(BackingSpeed),
        "Whether SRC answers at once, or slowly as over a network. [default: auto]",
    ),
    MountOption(
        "in_flight", "n_in_flight", _N_IN_FLIGHT, _number, "N",
        f"Send at most N parallel requests to a slow SRC, 1 to {_N_IN_FLIGHT_MAX}. [default: {_N_IN_FLIGHT}]",
    ),
    MountOption("engine", "engine", EngineMode.AUTO, partial(_one_of, EngineMode), _values(EngineMode)),
    MountOption(
        "passthrough", "passthrough", PassthroughMode.AUTO, partial(_one_of, PassthroughMode), _values(PassthroughMode),
        "Let reads and writes bypass the daemon; with on, fail if impossible. [default: auto]",
    ),
    MountOption(
        "uring", "uring", UringMode.AUTO, partial(_one_of, UringMode), _values(UringMode),
        "Transport requests by io_uring; with on, fail if impossible. [default: auto]",
    ),
)  # fmt: skip
_OF_ACCESS: Final = (
    MountOption("show_trash", "show_trash", False, help="List .trashd in the root directory, too."),
    MountOption("allow_other", "allow_other", None),
    MountOption("default_permissions", "default_permissions", False, is_told=False),
)
OPTIONS: Final = _OF_ANSWERS + _OF_ACCESS
"""In the order in which the help lists the options of `-o`; `-o remount` ignores them."""
LISTED: Final = _OF_ACCESS + _OF_ANSWERS
"""In the order in which the help lists the options of the command line."""
_BY_NAME: Final = {option.name: option for option in OPTIONS}


def parse_options(texts: Iterable[str], *, as_root: bool, is_sloppy: bool = False, usual: Coherence) -> MountOptions:
    """Parse the texts of all `-o`; the last option wins.

    as_root    root mounts for all users, others for themselves
    is_sloppy  ignore unknown options
    usual      the coherence if no option sets it
    Raises     UsageError
    """
    values = {option.field: option.default for option in OPTIONS} | {"coherence": usual, "allow_other": as_root}
    flags: set[str] = set()
    for word in _words(texts):
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
            raise UsageError(f"option {word}: not supported", _REFUSED[word])
        elif word not in _NOT_OURS and not word.startswith(_NOT_OURS_PREFIXES) and not is_sloppy:
            takes_none = has_value and (option is not None or key in _FLAGS)
            reason = f"option {key}: takes no value" if takes_none else f"option {word}: unknown"
            ours = ", ".join(option.word(option.value) for option in OPTIONS if option.is_told)
            raise UsageError(reason, f"known options: {ours}, and of mount(8): {', '.join(sorted(_FLAGS))}")
    if values["timeout_s"] is None:
        values["timeout_s"] = _TIMEOUTS_S[values["coherence"]]
    # Without the kernel's checks all users would have the daemon's permissions.
    values["default_permissions"] |= values["allow_other"]
    options = MountOptions(**values, flags=frozenset(flags))
    for word in ("passthrough=on", "uring=on"):
        field = word.partition("=")[0]
        if options.engine is EngineMode.PLAIN and getattr(options, field).value == "on":
            raise UsageError(f"{word} can't be combined with engine=plain")
    return options


def find_without_effect(texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The options of all `-o` that are accepted without effect, each with the reason or an alternative."""
    return ((word, _WITHOUT_EFFECT[word]) for word in _words(texts) if word in _WITHOUT_EFFECT)


def flags_after(texts: Sequence[str], flags: frozenset[str], *, is_sloppy: bool = False) -> frozenset[str] | None:
    """The kernel's flags after `-o remount,…`, starting from the present ones; None if `remount` is not requested.

    Other options that mount(8) adds, from fstab or from the mount table, have no effect.
    Raises  UsageError
    """
    words = list(_words(texts))
    if "remount" not in words:
        return None
    words = [word for word in words if word != "remount" and not word.startswith(_OF_THE_KERNELS_FUSE)]
    before = sorted(flag for flag in flags if flag in _FLAGS)
    return parse_options([*before, *words], as_root=True, is_sloppy=is_sloppy, usual=Coherence.SHARED).flags


def _words(texts: Iterable[str]) -> Iterator[str]:
    return (word for text in texts for word in re.findall(r'(?:[^,"]|"[^"]*"?)+', text))
