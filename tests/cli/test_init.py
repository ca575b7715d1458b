"""A root who can't note on a store that he made it, as in a container: it is said, by init and by doctor."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from fusefs.store.registry_lines import XATTR
from tests.support.real_filesystems import tmpfs_volume
from tests.support.store_verbs import assert_silent
from tests.support.trashd_command import TRASHD, CommandResult, done_well, environment, trashd

pytestmark = pytest.mark.needs("root")

LESS = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-all")


def in_a_container(*words: str | Path) -> CommandResult:
    """A command of root's without CAP_SYS_ADMIN."""
    done = subprocess.run([*LESS, TRASHD, *words], capture_output=True, text=True, env=environment({}), check=False)
    return CommandResult(done.returncode, done.stdout, done.stderr)


def test_init_and_doctor_say_what_it_means_until_it_is_noted() -> None:
    with tmpfs_volume() as volume:
        done_well("init", volume)
        os.removexattr(volume / ".trashd", XATTR)
        done = in_a_container("init", "--known", volume)
        assert done.code == 0, done
        assert XATTR not in os.listxattr(volume / ".trashd")
        assert "says that root made it" in done.err
        assert f"trashd init --known {volume}" in done.err
        told = json.loads(in_a_container("init", "--json", volume).out)
        assert "CAP_SYS_ADMIN" in told["unnoted"]
        doctor = trashd("doctor", volume)
        assert doctor.code == 1
        assert "says that root made it" in doctor.out
        assert f"trashd init {volume}" in doctor.out
        assert done_well("init", volume).err == ""
        assert XATTR in os.listxattr(volume / ".trashd")
        assert_silent(volume)


def test_a_root_who_cannot_note_it_makes_no_common_store() -> None:
    with tmpfs_volume() as volume:
        done = in_a_container("init", volume)
        assert (done.code, done.err) == (0, ""), done
        assert os.listdir(volume) == [".trashd-0"]
        done_well("init", volume)
        assert sorted(os.listdir(volume)) == [".trashd", ".trashd-0"]


def test_a_store_on_which_it_is_noted_is_told_as_ever() -> None:
    with tmpfs_volume() as volume:
        (told,) = done_well("init", "--json", volume).objects()
        assert told["unnoted"] == ""
        assert in_a_container("init", volume).err == ""
