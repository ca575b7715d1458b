"""The workbench of the tests: what hangs in it is freed, and nothing else on the machine."""

import os

import pytest

from tests.support.background_mounts import daemon_of, ended, mount, watchdog, workbench
from tests.support.busy_clients import one_file
from tests.support.foreground_mount import trashd_mount
from tests.support.proc_stat import stop

pytestmark = pytest.mark.needs("root", "fuse")


def test_a_test_that_died_frees_what_hangs_in_its_workbench_and_nothing_else() -> None:
    with one_file() as source, trashd_mount(source) as elsewhere, workbench() as bench:
        mount(bench / "source", bench / "target")
        pid = daemon_of(bench / "target")
        pid_fd = os.pidfd_open(pid)
        stop(pid)
        with watchdog(bench, 60) as guard:
            guard.communicate()  # the end of its stdin
        assert guard.returncode == 1
        with pytest.raises(OSError, match=r"not connected|abort"):
            os.lstat(bench / "target/new")
        ended(pid_fd)
        (elsewhere.path / "made").touch()
        assert (source / "made").exists()
