"""Where the service keeps its files, and a private directory that no other user enters."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fusefs.linux.kernel import Kernel
from fusefs.linux.runtime_directories import (
    SYSTEM_RUNTIME,
    PrivateDirectory,
    make_dir,
    read_file,
    replace_file,
    runtime_dir,
    state_dir,
)
from tests.support.other_users import as_user, passable_directory

SOMEBODY = 54321


def test_roots_places_do_not_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp")
        monkeypatch.setenv("XDG_STATE_HOME", "/tmp")
        assert (runtime_dir(), state_dir()) == (SYSTEM_RUNTIME, b"/var/lib/trashd")


@pytest.mark.needs("root")
@pytest.mark.parametrize(
    ("variables", "runtime", "state"),
    [
        ({"XDG_RUNTIME_DIR": "/run/x", "XDG_STATE_HOME": "/s"}, b"/run/x/trashd", b"/s/trashd"),
        ({"HOME": "/home/x"}, b"/home/x/.local/state/trashd/run", b"/home/x/.local/state/trashd"),
        (
            {"XDG_RUNTIME_DIR": "relative", "XDG_STATE_HOME": "", "HOME": "/home/x"},
            b"/home/x/.local/state/trashd/run",
            b"/home/x/.local/state/trashd",
        ),
    ],
    ids=["as a login has it", "no login", "nonsense"],
)
def test_a_users_places(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], runtime: bytes, state: bytes
) -> None:
    for name in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert as_user(SOMEBODY, lambda: (runtime_dir(), state_dir())) == (runtime, state)


@pytest.mark.needs("root")
def test_somebody_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_STATE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(FileNotFoundError):
        as_user(SOMEBODY, state_dir)


def test_a_directory_is_made_with_all_above_it(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path / "a" / "b")
    assert make_dir(path) == path == make_dir(path)
    assert os.path.isdir(path)


@pytest.mark.needs("root")
def test_a_users_directory_is_his_alone() -> None:
    with passable_directory(0o1777) as place:
        path = os.fsencode(place / "his")
        as_user(SOMEBODY, lambda: make_dir(path))
        assert os.stat(path).st_mode & 0o777 == 0o700


def test_a_file_is_read_as_it_was_put_there(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path / "file")
    replace_file(path, b"text", 0o600)
    assert read_file(path, 4, owner=os.geteuid()) == b"text"


def _replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (Path.unlink, errno.ENOENT),
        (lambda path: path.write_bytes(b"longer"), errno.EFBIG),
        (lambda path: path.chmod(0o620), errno.EPERM),
        (lambda path: path.with_name("other").hardlink_to(path), errno.EPERM),
        (lambda path: path.rename(path.with_name("other")) and path.symlink_to("other"), errno.ELOOP),
        (_replace_by_fifo, errno.EPERM),
    ],
    ids=["missing", "larger", "for others to write", "two names", "link", "fifo"],
)
def test_what_another_may_have_put_there_is_not_read(
    tmp_path: Path, spoil: Callable[[Path], object], code: int
) -> None:
    path = tmp_path / "file"
    replace_file(os.fsencode(path), b"text", 0o600)
    spoil(path)
    with pytest.raises(OSError, match=rf"\[Errno {code}\]"):
        read_file(os.fsencode(path), 4, owner=os.geteuid())


PREFIX = b".private-"
READABLE = os.O_RDONLY | os.O_DIRECTORY


def test_it_is_gone_in_the_end_with_what_was_made_in_it_moved_out(tmp_path: Path) -> None:
    kernel = Kernel()
    with (
        kernel.open_path(bytes(tmp_path), READABLE) as above,
        PrivateDirectory(kernel, above, PREFIX) as private,
    ):
        os.close(os.open("x", os.O_CREAT | os.O_WRONLY, dir_fd=private.open()))
        assert [path.name.startswith(".private-") for path in tmp_path.iterdir()] == [True]
        kernel.rename(private.open(), b"x", above, b"x")
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("call", ["openat2", "flock"])
def test_one_that_was_taken_for_abandoned_before_it_was_locked_is_made_again(tmp_path: Path, call: str) -> None:
    taken: list[Path] = []

    def take(reached: str) -> None:
        made = list(tmp_path.iterdir())
        if reached == call and made and not taken:
            taken.extend(made)
            made[0].rmdir()

    kernel = Kernel(take)
    with (
        kernel.open_path(bytes(tmp_path), READABLE) as above,
        PrivateDirectory(kernel, above, PREFIX) as private,
    ):
        os.close(os.open("x", os.O_CREAT | os.O_WRONLY, dir_fd=private.open()))
        (made,) = tmp_path.iterdir()
        assert [path.name for path in made.iterdir()] == ["x"]
        (made / "x").unlink()
    assert (len(taken), os.listdir(tmp_path)) == (1, [])
