"""A private directory: no other user enters it, and a process that takes it for abandoned gets nothing but that."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fusefs.linux.kernel import Kernel
from fusefs.linux.runtime_directories import PrivateDirectory

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
