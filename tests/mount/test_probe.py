"""However the trial of passthrough at the start goes wrong, the mount works without it, and says why; or fails."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.background_mounts import ended, workbench
from tests.support.broken_passthrough import misled
from tests.support.foreground_mount import Mounted, trashd_mount, until
from tests.support.passthrough_files import n_messages, why_off
from tests.support.real_filesystems import mount_of, tmpfs_volume
from tests.support.trashd_command import TRASHD, environment

pytestmark = [pytest.mark.needs("root", "fuse", "passthrough"), pytest.mark.rests_on("passthrough")]

LIMIT_S = 30.0
CONTENT = b"content " * 1024
REFUSED = 3
HANGS = "exec sleep 60"


class Trouble(NamedTuple):
    """What goes wrong.

    why      as the mount tells it
    cat      what the program is there, in sh; None: there is none
    mode     of that program
    command  what runs `trashd`
    """

    why: str
    cat: str | None = 'exec /bin/cat "$@"'
    mode: int = 0o755
    command: Sequence[str | Path] = (TRASHD,)


TROUBLES = {
    "the kernel asks": Trouble("the kernel agrees to it, and yet asks for reads", command=misled("asks")),
    "the kernel refuses": Trouble("reading through failed (exit code 1)", command=misled("refuses")),
    "no cat": Trouble("there is no cat to try it with: No such file or directory", cat=None),
    "a cat that can't be run": Trouble("there is no cat to try it with: Permission denied", mode=0o644),
    "killed before": Trouble("reading through failed (exit code -9)", cat="kill -9 $$"),
    "killed in the middle": Trouble("reading through failed (exit code -9)", cat='exec 3<"$2"; kill -9 $$'),
    "killed after": Trouble("reading through failed (exit code -9)", cat='/bin/cat "$2" >&3; kill -9 $$'),
    "another's content": Trouble("reading through failed (exit code 0)", cat="echo else"),
    "time": Trouble("reading through took longer than 0 s", cat=HANGS, command=misled("hurried")),
    "time, open": Trouble(
        "reading through took longer than 0 s", cat=f'exec 3<"$2"; {HANGS}', command=misled("hurried")
    ),
}


@pytest.fixture(params=TROUBLES)
def trouble(request: pytest.FixtureRequest) -> Trouble:
    return TROUBLES[request.param]


@contextmanager
def programs(trouble: Trouble) -> Iterator[Path]:
    """A PATH on which nothing is but what starts a mount, and that `cat`."""
    with tmpfs_volume() as path:
        for name in ("bash", "sleep", "mount", "umount"):
            (path / name).symlink_to(shutil.which(name) or name)
        if trouble.cat is not None:
            (path / "cat").write_text(f"#!/bin/sh\n{trouble.cat}\n")
            (path / "cat").chmod(trouble.mode)
        yield path


@contextmanager
def mounted_in(trouble: Trouble) -> Iterator[Mounted]:
    """With passthrough=auto, the default."""
    with ExitStack() as stack:
        volume = stack.enter_context(tmpfs_volume())
        (volume / "source").mkdir()
        path = stack.enter_context(programs(trouble))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", str(path))
            mount = trashd_mount(volume / "source", limit_s=LIMIT_S, command=trouble.command)
            mounted = stack.enter_context(mount)
        yield mounted


def test_the_mount_works_and_says_why_it_does_without(trouble: Trouble) -> None:
    with mounted_in(trouble) as mounted:
        assert why_off(mounted) == trouble.why
        assert f"passthrough ({trouble.why})" in mounted.log.read_text()
        file = mounted.path / "file"
        file.write_bytes(CONTENT)
        assert file.read_bytes() == CONTENT == (mounted.backing / "file").read_bytes()
        assert n_messages(mounted) > 0
        assert os.listdir(mounted.path) == ["file"]


@pytest.mark.parametrize("name", ["the kernel asks", "the kernel refuses", "killed in the middle", "time, open"])
def test_nothing_is_left_of_the_trial(name: str) -> None:
    with mounted_in(TROUBLES[name]) as mounted:
        assert until(lambda: not fds_of_the_trial(mounted))
        assert not children_of(mounted.pid)


def fds_of_the_trial(mounted: Mounted) -> list[str]:
    """What the daemon has open of it."""
    found = []
    for fd in Path(f"/proc/{mounted.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it has closed it by now
            found.append(os.readlink(fd))
    return [target for target in found if "trashd-probe" in target]


def children_of(pid: int) -> set[str]:
    """The programs that a process has started, and that have not ended."""
    found = set()
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread or the child has ended by now
            for child in children.read_text().split():
                found.add(Path(f"/proc/{child}/comm").read_text().strip())
    return found


def test_whoever_insists_gets_no_mount_and_is_told_why(trouble: Trouble) -> None:
    with workbench(LIMIT_S) as bench, programs(trouble) as path:
        words = [*trouble.command, "mount", "--passthrough", "on", bench / "source", bench / "target"]
        variables = environment({"PATH": str(path)})
        done = subprocess.run(words, capture_output=True, text=True, env=variables, check=False)
        assert done.returncode == REFUSED
        assert f"passthrough=on: {trouble.why}\n" in done.stderr
        assert "passthrough=auto mounts without it" in done.stderr
        assert mount_of(bench / "target") is None


def by_signal(daemon: int, _mount_point: Path) -> None:
    os.kill(daemon, signal.SIGTERM)


def by_unmounting(_daemon: int, mount_point: Path) -> None:
    subprocess.run(["umount", "--lazy", mount_point], check=True)


@pytest.mark.parametrize("cat", [HANGS, f'exec 3<"$2"; {HANGS}'], ids=["before", "open"])
@pytest.mark.parametrize("end", [by_signal, by_unmounting])
def test_the_trial_keeps_no_mount_from_ending(end: Callable[[int, Path], None], cat: str) -> None:
    """Nor does one whose end waits for the mount: it has a file open, and a close takes an answer."""
    with workbench(LIMIT_S) as bench, programs(Trouble("", cat=cat)) as path:
        words: list[str | Path] = [TRASHD, "mount", "--foreground", bench / "source", bench / "target"]
        with subprocess.Popen(words, stderr=subprocess.PIPE, env=environment({"PATH": str(path)})) as daemon:
            assert until(lambda: "sleep" in children_of(daemon.pid))
            pid_fd = os.pidfd_open(daemon.pid)
            end(daemon.pid, bench / "target")
            ended(pid_fd)
            _out, said = daemon.communicate()
        assert daemon.returncode == 0, said
        assert mount_of(bench / "target") is None
