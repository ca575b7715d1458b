"""`remount` gives back what the mount itself refused, and nothing of what SRC's mount, or its user, refuses."""

import os
from pathlib import Path

import pytest

from fusefs.core.errors import NotPermitted
from fusefs.linux.mountinfo import read_mounts
from fusefs.mount.places.attach import remount
from tests.support.background_mounts import backing_of, mount
from tests.support.other_users import as_user, run_as
from tests.support.real_filesystems import bind_mount
from tests.support.trashd_command import TRASHD, done_well

pytestmark = pytest.mark.needs("root", "fuse")

USER = 1000
RESTRICTIONS = ("ro", "nosuid", "nodev", "noexec", "nosymfollow")
EVERYTHING = "remount,rw,suid,dev,exec,symfollow,atime,diratime"


def flags_at(path: Path) -> set[str]:
    """Of what one sees mounted at exactly this path."""
    found = [one for one in read_mounts() if one.point == os.fsencode(path)]
    return set(found[-1].flags())


def target_of(bench: Path, where: str) -> Path:
    return bench / ("source" if where == "over itself" else "target")


@pytest.mark.parametrize("where", ["elsewhere", "over itself"])
@pytest.mark.parametrize("flag", RESTRICTIONS)
def test_what_the_mount_of_the_source_refuses_stays_refused(bench: Path, flag: str, where: str) -> None:
    source, target = bench / "source", target_of(bench, where)
    with bind_mount(source, source, [flag]):
        mount(source, target)
        for words in (EVERYTHING, "remount,sync", EVERYTHING):
            assert remount(os.fsencode(target), [words])
            assert flag in flags_at(target)
            assert where == "elsewhere" or flag in flags_at(backing_of(target))
        done_well("umount", target)


@pytest.mark.parametrize("flag", ["noatime", "nodiratime", "strictatime"])
def test_times_of_access_stay_as_the_mount_of_the_source_says(bench: Path, flag: str) -> None:
    source = bench / "source"
    with bind_mount(source, source, [flag]):
        before = flags_at(source) & {"noatime", "nodiratime", "relatime"}
        mount(source)
        for words in (EVERYTHING, "remount,ro", EVERYTHING):
            assert remount(os.fsencode(source), [words])
            assert flags_at(backing_of(source)) & {"noatime", "nodiratime", "relatime"} == before
        done_well("umount", source)


@pytest.mark.parametrize("where", ["elsewhere", "over itself"])
@pytest.mark.parametrize("flag", RESTRICTIONS)
def test_what_the_mount_alone_refuses_is_given_back_on_request_and_not_before(
    bench: Path, flag: str, where: str
) -> None:
    source, target = bench / "source", target_of(bench, where)
    mount(source, target, "-o", flag)
    seen = [target] if where == "elsewhere" else [target, backing_of(target)]
    assert remount(os.fsencode(target), ["remount,sync"])
    assert all(flag in flags_at(path) for path in seen)
    assert remount(os.fsencode(target), [EVERYTHING])
    assert not any(flag in flags_at(path) for path in seen)


@pytest.mark.parametrize("flag", ["ro", "noexec"])
def test_what_a_user_refuses_in_his_mount_root_gives_to_nobody(users_bench: Path, flag: str) -> None:
    target = users_bench / "target"
    run_as(USER, [TRASHD, "mount", users_bench / "source", target, "-o", flag], check=True)
    assert remount(os.fsencode(target), [EVERYTHING])
    assert flags_at(target) >= {flag, "nosuid", "nodev"}
    assert remount(os.fsencode(target), ["remount,ro"])
    assert flags_at(target) >= {flag, "nosuid", "nodev", "ro"}
    run_as(USER, [TRASHD, "umount", target], check=True)


def test_a_user_changes_no_mount_not_even_his(users_bench: Path) -> None:
    target = users_bench / "target"
    run_as(USER, [TRASHD, "mount", users_bench / "source", target, "-o", "ro"], check=True)
    with pytest.raises(NotPermitted):
        as_user(USER, lambda: remount(os.fsencode(target), [EVERYTHING]))
    assert flags_at(target) >= {"ro", "nosuid", "nodev"}
    run_as(USER, [TRASHD, "umount", target], check=True)
