"""Commands in a small world of their own: what they print, end with and leave on disk, without what varies by run.

The world is a mount namespace in which /run, /etc/trashd and root's registry are fresh; each command is a child of this
process, which has imported all, so that a hundred take seconds.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from fusefs.cli import main, mount_helper
from fusefs.core.service_status import CurrentReap, Status, StatusFault, VolumePhase, VolumeStatus
from fusefs.linux.runtime_directories import SYSTEM_RUNTIME
from fusefs.service.status_file import write_status
from tests.renaming.scripts import FILES, FOR_USER, SCENE, WRONG, WRONG_MOUNTS
from tests.support.make_trees import IMMUTABLE, make_tree, set_flags
from tests.support.mount_namespaces import see_own_mounts_only
from tests.support.stored_samples import PLANTED, SOUND, unpack
from tests.support.trashd_command import Done

PLACE = Path("/run/played")
VOLUME, HOME = PLACE / "v", PLACE / "home"
USER = 1001
_N_FILES = 20_000
_UPPER, _WORK = Path("/run/upper"), Path("/run/work")
_STATES = ("stage", "orphans", "reaping", "restoring", "quarantine", "reserve")
_VARIES: Mapping[str, str] = {
    r"\d{8}T\d{6}\.\d{3}Z-([A-Za-z0-9._-]*)-[0-9a-f]{12}": r"<id of \1>",
    r"\b[0-9a-f]{32}\b": "<32 hex digits>",
    r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b": "<uuid>",
    r"\b\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:?\d\d)?": "<time>",
    r"\b1[789]\d{17}\b": "<ns>",
    r"(?<=>) +(\d+[wdhms]){1,2} +((\d+[wdhms]){1,2} +)?": "  <age>  ",
    r"^ID .*": "<columns of a table>",
    r"\b\d+w\d+d\b": "<weeks>",
    r"  \d{4}-\d\d-\d\d  ": "  <day>  ",
    r'"retention_s": ?1728\d\d': '"retention_s": <2 days>',
    r"\b\d+(\.\d+)? (ms|µs|us)\b": "<time> ms",
    r"\bin \d+(\.\d+)? ?s\b(, [\d,]+/s)?": "in <s>",
    r"(?<=1:)[0-9a-f]+(?= 2 <ns>)|(?<=<32 hex digits> )[0-9a-f]+(?= /)|(?<=sha256 )[0-9a-f]{64}": "<hex digits>",
}
_NUMBERS = re.compile(
    r'"(ino|btime_ns|created_ns|expires_ns|at_ns|moved_ns|boot_ns|updated_boot_ns|seconds|elapsed_s|took_s|restorable_for_s|age_s|until_s'
    r'|gap_ns|free_bytes|total_bytes|available_bytes|free_inodes|total_inodes|st_dev|device|pid)": ?-?\d+(\.\d+)?'
)
_WORDS = re.compile(r'"(handle|boot|host|superblock|created|expires|filesystem|project)": ?"[^"]*"')


def enter() -> None:
    """Have this process in a world of its own: its commands see no mount, store or service of others."""
    see_own_mounts_only()
    os.umask(0o022)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_N_FILES, _N_FILES))
    for name in [name for name in os.environ if name.startswith(("XDG_", "TRASHD_"))]:
        del os.environ[name]
    os.environ.update({"COLUMNS": "80", "LC_ALL": "C.UTF-8", "NO_COLOR": "1", "HOME": "/root", "TZ": "UTC"})
    time.tzset()
    os.makedirs("/var/lib/trashd", 0o755, exist_ok=True)
    for place in ("/run", "/var/lib/trashd"):
        _mount(place)
    for layer in (_UPPER, _WORK):
        layer.mkdir()
    layers = f"lowerdir=/etc,upperdir={_UPPER},workdir={_WORK}"  # so that /etc/trashd is made in here alone
    subprocess.run(["mount", "-t", "overlay", "-o", layers, "overlay", "/etc"], check=True)
    shutil.rmtree("/etc/trashd", ignore_errors=True)
    os.mkdir("/etc/trashd")
    PLACE.mkdir()
    VOLUME.mkdir()
    HOME.mkdir(0o700)
    os.chown(HOME, USER, USER)


def leave() -> None:
    """Unmount what is left in there: a daemon that serves a mount ends with it, however the scene ended."""
    subprocess.run(["umount", "--recursive", "--lazy", VOLUME], stderr=subprocess.DEVNULL, check=False)


def _mount(place: str | Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m,mode=0755", "tmpfs", place], check=True)


def fresh_volume() -> None:
    """An empty tmpfs at VOLUME, and nothing left of what was there."""
    if os.path.ismount(VOLUME):
        subprocess.run(["umount", VOLUME], check=True)
    _mount(VOLUME)
    registry = Path("/var/lib/trashd")
    for path in registry.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def run(*words: str, uid: int = 0, act: Callable[[list[str]], int] = main.run) -> Done:
    """A command line in a child of this process, from the volume, without any input."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull) as given:
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                os.chdir(VOLUME)
                for fd, file in enumerate((given, out, err)):
                    os.dup2(file.fileno(), fd)
                sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
                sys.stderr = os.fdopen(2, "w", errors="backslashreplace")
                if uid:
                    _become(uid)
                code = act(list(words))
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(os.fsdecode(file.read()))
        return Done(code, *said)


def _become(uid: int) -> None:
    os.environ["HOME"] = str(HOME)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def told(title: str, done: Done) -> str:
    """A command's end for the frozen text."""
    parts = [f"$ {title}\n"]
    parts += [f"{name}: {line}\n" for name, text in (("out", done.out), ("err", done.err)) for line in _steady(text)]
    return "".join([*parts, f"exit {done.code}\n\n"])


def _steady(text: str) -> Iterator[str]:
    return map(_words, text.splitlines())


def _words(line: str) -> str:
    line = _WORDS.sub(r'"\1": <\1>', _NUMBERS.sub(r'"\1": <\1>', line))
    for pattern, word in _VARIES.items():
        line = re.sub(pattern, word, line)
    return line.replace(sys.prefix, "<prefix>")


def on_disk(top: Path) -> str:
    """All below a directory: kinds, modes, owners, and the text of small files."""
    lines = []
    for directory, names, files in os.walk(top):
        names.sort()
        for name in sorted(names + files):
            path = Path(directory, name)
            st = path.lstat()
            text = f" -> {os.readlink(path)}" if stat.S_ISLNK(st.st_mode) else ""
            lines.append(f"{stat.filemode(st.st_mode)} {st.st_uid} {_words(str(path))}{_words(text)}\n")
            if stat.S_ISREG(st.st_mode):
                content = path.read_text(encoding="utf-8", errors="backslashreplace")
                lines += [f"    {line}\n" for line in _steady(content)]
    return "".join(lines)


def identifier(name: str) -> str:
    """The id of the newest container of something with this name, in whatever state."""
    found = [path.name for state in _STATES for path in VOLUME.glob(f".trashd/u/*/{state}/*-{name}-*")]
    return max(found, default=f"no-{name}")


def play(script: str) -> str:
    """What all of its command lines tell."""
    return "".join(told(line, _play(line)) for line in _commands(script))


def _commands(script: str) -> Iterator[str]:
    for line in script.splitlines():
        if line.startswith("! "):
            name, *words = line[2:].split()
            _ACTS[name](*words)
        else:
            yield line


def _play(line: str) -> Done:
    words = [re.sub(r"<([\w.]+)>", lambda match: identifier(match[1]), word) for word in line.split()]
    return run(*[word.replace("␣", " ") for word in words])


def _make(name: str) -> Path:
    return make_tree(VOLUME / name, {"file": "content", "d": {"deeper": "more", "b.log": "log"}})


def _make_flagged(name: str) -> None:
    set_flags(_make(name) / "file", IMMUTABLE)


def _mkdir(name: str) -> None:
    (VOLUME / name).mkdir()


def _write(name: str, file: str) -> None:
    (VOLUME / name).write_text(FILES[file], encoding="utf-8")


def _plant(where: str) -> None:
    make_tree(VOLUME / ".trashd/u/0" / where, {"file": "content"})


def _tell_status() -> None:
    os.makedirs(SYSTEM_RUNTIME, 0o755, exist_ok=True)
    volume = VolumeStatus(
        path="/run/played/v", id="f" * 32, filesystem="tmpfs", phase=VolumePhase.REAPING, why="a reason",
        n_users=2, n_orphans=5, n_due=3, n_quarantined=1, entries_per_s=1000.0, bytes_per_s=1e6,
        tempo_entries_per_s=500, io=0.25, memory=0.0, cpu=0.5, probe_ms=2.0, unlink_us=20.0, eta_s=60.0,
        oldest_overdue_s=7.0, free_bytes=10 << 30, total_bytes=100 << 30, free_inodes=4, total_inodes=8,
        free_trend_bytes_per_s=-5e6, removed_entries=1000, freed_bytes=4096, n_reaped=9,
        current=(CurrentReap(1000, "abcdef", 77),), faults=(StatusFault(10**18, "a fault"),),
    )  # fmt: skip
    quiet = [VolumeStatus(path=f"/{phase.value}", phase=phase) for phase in VolumePhase]
    volumes = (volume, *quiet, VolumeStatus(path="/home/x", owner=1000, n_orphans=1))
    status = Status(
        version="0.1", pid=1 << 22, boot_id="b", started_ns=10**18, updated_ns=10**18 + 10**9,
        config_files=("/etc/trashd/config.toml",), volumes=volumes,
    )  # fmt: skip
    write_status(SYSTEM_RUNTIME, status)


_ACTS: Mapping[str, Callable[..., object]] = MappingProxyType(
    {
        "make": _make,
        "make_flagged": _make_flagged,
        "mkdir": _mkdir,
        "write": _write,
        "plant": _plant,
        "tell_status": _tell_status,
    }
)


def scene() -> str:
    """Every command in one small store, and what lies in it at the end."""
    fresh_volume()
    text = play(SCENE)
    return text + on_disk(VOLUME) + on_disk(Path("/var/lib/trashd"))


def wrong_calls() -> str:
    """What is told to who asks for what can't be."""
    fresh_volume()
    run("init", str(VOLUME))
    for name in ("a", "b"):
        _make(name)
    (VOLUME / "file").touch()
    (VOLUME / "link").symlink_to("a")
    text = [told(line, _play(line)) for line in WRONG.splitlines()]
    text += [
        told(f"(mount.fuse.trashd) {line}", run(*line.split(), act=mount_helper.run))
        for line in WRONG_MOUNTS.splitlines()
    ]
    return "".join(text)


def for_user() -> str:
    """What a user is told who has one own directory in a volume of root's."""
    fresh_volume()
    run("init", str(VOLUME))
    _make("roots")
    make_tree(VOLUME / "mine", {"m": {"file": "content"}})
    subprocess.run(["chown", "-R", f"{USER}:{USER}", VOLUME / "mine"], check=True)
    return "".join(told(f"(user) {line}", run(*line.split(), uid=USER)) for line in FOR_USER.splitlines())


_LOOKS = """\
list --volume .
list --json --volume .
quarantine list --json --volume .
check --json .
doctor --json .
"""


def samples() -> str:
    """Stores of the first format: listed and checked as they are, and when `trashd init` has made them today's."""
    parts = []
    for sample in (SOUND, PLANTED):
        fresh_volume()
        unpack(sample, VOLUME)
        parts.append(play(f"{_LOOKS}init --json .\n{_LOOKS}") + on_disk(VOLUME / ".trashd"))
    return "".join(parts)


def installed() -> str:
    """What `trashd service install` tells and lays down, for all and for one user; manual and example only by name."""
    root = PLACE / "root"
    text = play("service install --root /run/played/root\n" * 2) + _without_documents(root)
    text += play("service install --prefix /usr --root /run/played/usr\nservice uninstall --root /run/played/root")
    return text + on_disk(root)


def _without_documents(root: Path) -> str:
    for name in ("trashd.1", "config.toml"):
        for path in root.rglob(name):
            path.write_text("")
    return on_disk(root)
