"""Files without a name."""

from __future__ import annotations

import os
import subprocess

import pytest

from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from tests.support.real_filesystems import loop_volume

pytestmark = pytest.mark.needs("root", "loop")


def test_a_directory_that_was_removed_is_told_as_such_by_ext4() -> None:
    """It says EPERM, as of what is forbidden. Other filesystems make the file; no name can be given to it."""
    with loop_volume("ext4") as volume:
        directory = volume / "gone"
        directory.mkdir()
        with Fd(os.open(directory, os.O_RDONLY | os.O_DIRECTORY)) as fd:
            directory.rmdir()
            with pytest.raises(FileNotFoundError):
                Kernel().create_unnamed(fd)


def test_a_directory_that_is_immutable_forbids_them() -> None:
    with loop_volume("ext4") as volume:
        directory = volume / "kept"
        directory.mkdir()
        subprocess.run(["chattr", "+i", directory], check=True)
        with Fd(os.open(directory, os.O_RDONLY | os.O_DIRECTORY)) as fd, pytest.raises(PermissionError):
            Kernel().create_unnamed(fd)
        subprocess.run(["chattr", "-i", directory], check=True)
