"""Who takes part in the benchmarks of the mount: what each runs, where it is found, and how its figures are told."""

import contextlib
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

from bench.support import PYTHON, TRASHD, tell
from tests.support.fuse_watchdog import FuseMount, device_for_all, fuse_mount
from tests.support.machine_capabilities import SFTP_SERVER

NATIVE, OURS, EXAMPLE = "native", "trashd", "passthroughfs"
SINGLE = "trashd, one user"
"""Mounted by a user, for himself: the filesystem below checks permissions, not the kernel."""
HP, LL = "passthrough_hp", "passthrough_ll"
"""Examples of libfuse's, where the environment says where they are."""
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
        "bindfs": ("bindfs", "-f", "{source}", "{point}"),
        "mergerfs": ("mergerfs", "-f", "-o", MERGERFS_OPTIONS, "{source}", "{point}"),
        EXAMPLE: (PYTHON, "{example}", "{source}", "{point}"),
    }
)
_PROGRAMS = MappingProxyType[str, tuple[str, tuple[str, ...]]](
    {
        HP: ("TRASHD_BENCH_PASSTHROUGH_HP", ("--foreground", "{source}", "{point}")),
        LL: ("TRASHD_BENCH_PASSTHROUGH_LL", ("-f", "-o", "source={source}", "{point}")),
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

    def __init__(self, kind: str, told: str) -> None:
        super().__init__(f"{kind}: {told}")
        self.kind = kind  # missing or failed
        self.told = told


def all_subjects() -> Words:
    """What each runs, with those that the environment names, and those that take part here and there."""
    found = dict(SUBJECTS)
    found[SSHFS] = ("sshfs", "-f", "-o", SSHFS_OPTIONS, "localhost:{source}", "{point}")
    found[SINGLE] = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", *SUBJECTS[OURS])
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
        with fuse_mount(command, Path(point), limit_s) as fuse:
            yield fuse.path, fuse


def cpu_s(fuse: FuseMount | None) -> float:
    """Seconds of processor time that a mount's daemon has used so far, all its threads together; native has none."""
    if fuse is None:
        return 0.0
    # pid (name) state …: the name may hold anything; user and system time are the 14th and 15th field.
    fields = Path(f"/proc/{fuse.pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
            tell(f"round {number + 1} of {n_rounds}: {name}")
            began = time.monotonic()
            try:
                turns[name].append(turn(name))
            except Unable as error:
                out[name] = {error.kind: error.told}
                tell(f"{name}: {error}")
            taken_s[name] += time.monotonic() - began
    return {name: out.get(name) or summary(turns[name]) for name in names}


def summary(turns: Sequence[dict[str, float]]) -> dict[str, Any]:
    """All turns of one subject: the medians, and each."""
    seconds = {key: [round(turn[key], 9) for turn in turns] for key in turns[0]}
    return {"medians": {key: statistics.median(values) for key, values in seconds.items()}, "seconds": seconds}


def versions() -> dict[str, str]:
    """Of what takes part and is there."""
    told = {name: importlib.metadata.version(name) for name in ("trashd", "pyfuse3", "trio")}
    commands = {"commit": ["git", "describe", "--always", "--dirty"]}
    commands |= {name: [name, "--version"] for name in ("bindfs", "mergerfs", "git", "fio")}
    commands |= {"coreutils": ["ls", "--version"], "libfuse": ["fusermount3", "--version"]}
    commands["sshfs"] = ["sh", "-c", "sshfs -V | grep SSHFS"]  # tells fusermount3's version first
    for name, command in commands.items():
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
            told[name] = said.stdout.splitlines()[0].rpartition(" ")[2].removeprefix("fio-")
    return told


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
