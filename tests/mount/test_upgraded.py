"""A mount outlives the package that it came from: its daemon has all of its modules before it says that it is ready."""

import os
from pathlib import Path

import pytest

from tests.support.foreground_mount import trashd_mount
from tests.support.make_trees import Dir, make_tree
from tests.support.replaced_package import ReplacedPackage, modules_ever
from tests.support.trashd_command import done_well, swapped, trashd

pytestmark = pytest.mark.needs("fuse", "root")


def test_a_running_daemon_loads_no_module_of_a_new_version(volume: Path, tmp_path: Path) -> None:
    source = make_tree(volume / "upgraded", {"job": Dir({"file": "content"})})
    package = ReplacedPackage(tmp_path)
    with trashd_mount(source, command=package.command) as mounted:
        had = package.replace()
        late = {name for name in modules_ever("fusefs.mount.life.daemon") if not name.startswith("fusefs.mount.plain")}
        assert late <= had
        job = mounted.path / "job"
        told = swapped(job)
        assert os.listdir(job) == []
        done_well("restore", told["id"])
        assert (job / "file").read_text() == "content"
        os.setxattr(job / "file", "user.key", b"value")
        (job / "file").rename(job / "other")
        (job / "link").symlink_to("other")
        job.rename(mounted.path / ".trashd/drop/job")
        assert str(mounted.path) in trashd("status").out
        assert package.imported_since() == []
    assert package.imported_since() == []
