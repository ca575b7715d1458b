"""Who takes part in the benchmarks of the mount: what each runs, where it is found, and how its figures are told."""

import contextlib
import errno
import importlib.metadata
import os
import shutil
import statistics
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench import uring
from bench.processor_time import DAEMON, counted_by, in_group, used_s
from bench.support import PYTHON, TRASHD, print_progress
from fusefs.core.mount_options import MountOptions
from tests.support.fuse_watchdog import FuseMount, device_for_all, fuse_mount
from tests.support.machine_capabilities import SFTP_SERVER
from tests.support.real_filesystems import mount_of

NATIVE, OURS, EXAMPLE = "native", "trashd", "passthroughfs"
BINDFS, MERGERFS = "bindfs", "mergerfs"
DEVICE = "trashd, /dev/fuse"
"""Ours without io_uring; what ours comes by otherwise, `traits` tells."""
BEFORE = "trashd before, /dev/fuse"
"""Another version's, where the environment says where its command is."""
SINGLE = "trashd, one user"
"""Mounted by a user, for himself: the filesystem below checks permissions, not the kernel."""
HP_URING, HP, LL = "passthrough_hp, io_uring", "passthrough_hp", "passthrough_ll"
"""Examples of libfuse's, where the environment says where they are."""
HP_NO_XATTR = "passthrough_hp, no getxattr"
"""Of a libfuse built without extended attributes: it is asked for one once, and then never again."""
LL_CHECKED = "passthrough_ll, checked"
"""The kernel checks permissions; as it ships, nobody does."""
SSHFS = "sshfs"
USER = 1000
MERGERFS_OPTIONS = (
    "allow_other,use_ino,minfreespace=0,cache.files=auto-full,cache.readdir=true,cache.symlinks=true,"
    "cache.attr=3600,cache.entry=3600,cache.negative_entry=3600"
)
SSHFS_OPTIONS = (
    "allow_other,default_permissions,dcache_timeout=3600,dcache_max_size=1000000,entry_timeout=3600,attr_timeout=3600,"
    f"ssh_command=sh -c {SFTP_SERVER}"  # it stands for ssh, whose arguments sh -c passes over
)
Words = Mapping[str, tuple[str, ...]]
# What each runs to serve a directory at a mount point, in the foreground; native serves itself.
SUBJECTS = MappingProxyType[str, tuple[str, ...]](
    {
        NATIVE: (),
        OURS: (TRASHD, "mount", "{source}", "{point}", "--foreground", "--coherence", "exclusive"),
        BINDFS: ("bindfs", "-f", "{source}", "{point}"),
        MERGERFS: ("mergerfs", "-f", "-o", MERGERFS_OPTIONS, "{source}", "{point}"),
        EXAMPLE: (PYTHON, "{example}", "{source}", "{point}"),
    }
)
_HP_PROGRAM, _LL_PROGRAM = "TRASHD_BENCH_PASSTHROUGH_HP", "TRASHD_BENCH_PASSTHROUGH_LL"
_HP_WORDS = ("--foreground", "-o", "allow_other", "{source}", "{point}")  # it has the kernel check by itself
_PROGRAMS = MappingProxyType[str, tuple[str, tuple[str, ...]]](
    {
        HP_URING: (_HP_PROGRAM, ("--foreground", "-o", "allow_other,io_uring", "{source}", "{point}")),
        HP: (_HP_PROGRAM, _HP_WORDS),
        HP_NO_XATTR: ("TRASHD_BENCH_PASSTHROUGH_HP_NO_XATTR", _HP_WORDS),
        LL: (_LL_PROGRAM, ("-f", "-o", "allow_other,source={source}", "{point}")),
        LL_CHECKED: (_LL_PROGRAM, ("-f", "-o", "allow_other,default_permissions,source={source}", "{point}")),
    }
)
CPU = "cpu"
"""By which a turn's figures have the seconds of the daemon's processor time."""
# Ten times what the slowest needs for a turn; then its watchdog ends it.
LIMIT_S = 60.0
DOWNLOAD_LIMIT_S = 120.0

Row = dict[str, Any]


class Unable(Exception):
    """A subject that is not there or did not get it done; what else goes wrong ends the run."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(f"{kind}: {reason}")
        self.kind = kind  # missing or failed
        self.reason = reason


def all_subjects() -> Words:
    """What each runs, with those that the environment names, and those that take part here and there."""
    found = dict(SUBJECTS)
    found[SSHFS] = ("sshfs", "-f", "-o", SSHFS_OPTIONS, "localhost:{source}", "{point}")
    if hasattr(MountOptions, "uring"):
        found[DEVICE] = (*SUBJECTS[OURS], "-o", "uring=off")
        if uring.is_switched_on():
            found[OURS] = (*SUBJECTS[OURS], "-o", "uring=on")
    found[SINGLE] = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", *SUBJECTS[OURS])
    if before := os.environ.get("TRASHD_BENCH_BEFORE"):
        found[BEFORE] = (before, *SUBJECTS[OURS][1:], "-o", "uring=off")
    for name, (variable, words) in _PROGRAMS.items():
        if program := os.environ.get(variable):
            found[name] = (program, *words)
    return found


def fetch_example() -> Path:
    """The example from the source of the pyfuse3 that is installed, which pip fetches once.

    Raises  Unable
    """
    version = importlib.metadata.version("pyfuse3")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trashd-bench"
    example = cache / f"{EXAMPLE}-{version}.py"
    if example.exists():
        return example
    with tempfile.TemporaryDirectory() as scratch:
        pip = [PYTHON, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "pyfuse3", "--dest", scratch]
        try:
            subprocess.run([*pip, f"pyfuse3=={version}"], check=True, capture_output=True, timeout=DOWNLOAD_LIMIT_S)
            (archive,) = Path(scratch).glob("*.tar.gz")
            with tarfile.open(archive) as files:
                member = files.extractfile(f"pyfuse3-{version}/examples/passthroughfs.py")
                text = member.read() if member else b""
        except (subprocess.SubprocessError, KeyError) as error:
            raise Unable("missing", f"the source of pyfuse3 {version}: {error}") from error
    cache.mkdir(parents=True, exist_ok=True)
    example.write_bytes(text)
    return example


@contextlib.contextmanager
def served(
    name: str, source: Path, example: Path | None = None, *, words: Words = SUBJECTS, limit_s: float = LIMIT_S
) -> Iterator[tuple[Path, FuseMount | None]]:
    """A directory as a subject shows it, and its mount; native has none.

    words   what each runs, if not what SUBJECTS says
    Raises  Unable: its program is not there; see fuse_mount for the rest
    """
    if name == NATIVE:
        yield source, None
        return
    with contextlib.ExitStack() as stack:
        point = stack.enter_context(tempfile.TemporaryDirectory(prefix="trashd-mount-"))
        if name == SINGLE:
            os.chown(point, USER, USER)
            stack.enter_context(device_for_all())
        if "{example}" in words[name]:
            example = example or fetch_example()
        command = [word.format(source=source, point=point, example=example) for word in words[name]]
        if not shutil.which(command[0]):
            raise Unable("missing", command[0])
        if name == OURS:  # a thread on each core; one of them serves a client that stays on its own
            command = ["taskset", "--cpu-list", f"0-{(os.cpu_count() or 1) - 1}", *command]
        with fuse_mount(in_group(DAEMON, command), Path(point), limit_s) as fuse:
            yield fuse.path, fuse


def cpu_s(fuse: FuseMount | None) -> float:
    """Seconds of processor time that a mount's daemon has used so far, all its threads together; native has none."""
    return 0.0 if fuse is None else used_s(DAEMON, fuse.pid)


def traits(path: Path, fuse: FuseMount | None) -> dict[str, Any]:
    """What must be known of a subject that serves a directory to compare its figures.

    transport   what messages come by, "" if there are none
    checks      whether the kernel checks permissions
    getxattr    whether it answers a question for an extended attribute, which `ls -l` has for each file
    """
    getxattr = True
    try:
        os.getxattr(path, "user.trashd-bench")
    except OSError as error:
        getxattr = error.errno != errno.ENOTSUP
    if fuse is None:
        return {"transport": "", "checks": True, "getxattr": getxattr}
    mount = mount_of(path)
    checks = mount is not None and "default_permissions" in mount.options
    return {"transport": uring.transport(fuse.pid), "checks": checks, "getxattr": getxattr}


def take_turns(
    names: Sequence[str], n_rounds: int, patience_s: float, turn: Callable[[str], dict[str, float]]
) -> dict[str, Any]:
    """What each subject took, or why it is left out; all take turns, and the order rotates.

    patience_s  who has taken longer gets no more turns
    turn        the figures of one; raises Unable
    """
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    taken_s = dict.fromkeys(names, 0.0)
    out: dict[str, dict[str, str]] = {}
    for number in range(n_rounds):
        begin = number % len(names)
        for name in (*names[begin:], *names[:begin]):
            if name in out or taken_s[name] > patience_s:
                continue
            print_progress(f"round {number + 1} of {n_rounds}: {name}")
            began = time.monotonic()
            try:
                turns[name].append(turn(name))
            except Unable as error:
                out[name] = {error.kind: error.reason}
                print_progress(f"{name}: {error}")
            taken_s[name] += time.monotonic() - began
    return {name: out.get(name) or summary(turns[name]) for name in names}


def summary(turns: Sequence[dict[str, float]]) -> dict[str, Any]:
    """All turns of one subject: the medians, and each; without what was not done in all of them."""
    keys = [key for key in turns[0] if all(key in turn for turn in turns)]
    seconds = {key: [round(turn[key], 9) for turn in turns] for key in keys}
    return {"medians": {key: statistics.median(values) for key, values in seconds.items()}, "seconds": seconds}


def versions() -> dict[str, str]:
    """Of what takes part and is there, and of what counts its processor time."""
    told = {name: importlib.metadata.version(name) for name in ("trashd", "pyfuse3", "trio")}
    commands = {"commit": ["git", "describe", "--always", "--dirty"]}
    commands |= {name: [name, "--version"] for name in (BINDFS, MERGERFS, "git", "fio", "npm")}
    commands |= {"coreutils": ["ls", "--version"], "libfuse": ["fusermount3", "--version"]}
    commands["sshfs"] = ["sh", "-c", "sshfs -V | grep SSHFS"]  # tells fusermount3's version first
    for name, command in commands.items():
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
            told[name] = said.stdout.splitlines()[0].rpartition(" ")[2].removeprefix("fio-")
    for name, (variable, _) in _PROGRAMS.items():
        if program := os.environ.get(variable):
            told[name] = f"libfuse {_libfuse_of(program)}"
    return told | {"processor time": counted_by()}


def _libfuse_of(program: str) -> str:
    """The version of the library that an example finds, as the library's own file is named."""
    said = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout.splitlines()
    paths = [words[2] for words in map(str.split, said) if words[0].startswith("libfuse3") and len(words) > 2]
    return Path(paths[0]).resolve().name.partition(".so.")[2] if paths else "unknown"


def conditions(row: Row, where: str) -> str:
    """Where, when, by what and on which machine a row was measured."""
    on, said = row["machine"], row["versions"]
    programs = ", ".join(f"{name} {version}" for name, version in said.items())
    return (
        f"{where}, {row['at']}, {programs}; Linux {on['kernel']}, "
        f"{row['n_cpus']} x {on['cpu']}, {on['memory_gib']} GiB, Python {on['python']}, load {row['load_before']}"
    )


def markdown(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table."""
    rows = ([cell.replace("|", "\\|") for cell in cells] for cells in (heads, ["---"] * len(heads), *lines))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
