"""The kernel keeps where links lead, and is never wrong about it: another link is another inode."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.foreground_mount import SHARED_LIMIT_S, Mounted, trashd_mount, until
from tests.support.open_files import held
from tests.support.other_users import as_user

pytestmark = pytest.mark.needs("root", "fuse", "loop")

ALICE, BOB = 4711, 4712
LONG = "d/" * 500 + "end"
_NUMBERS = itertools.count()


@pytest.fixture(scope="module", params=["exclusive", "shared"])
def mount(volume: Path, request: pytest.FixtureRequest) -> Iterator[Mounted]:
    options = (f"coherence={request.param}",)
    with trashd_mount(volume / request.param, options=options, limit_s=SHARED_LIMIT_S) as mounted:
        yield mounted


@pytest.fixture
def link(mount: Mounted) -> Path:
    """A link to `first`, whose target the kernel keeps."""
    path = mount.path / f"link{next(_NUMBERS)}"
    path.symlink_to("first")
    assert os.readlink(path) == "first"
    return path


@pytest.mark.takes_engine
def test_a_link_is_asked_for_once(mount: Mounted, link: Path) -> None:
    with held(link):
        assert os.readlink(link) == "first"
        n = mount.n_asked("readlink")
        assert [os.readlink(link) for _ in range(9)] == ["first"] * 9
        assert mount.n_asked("readlink") == n


def by_unlinking(link: Path) -> None:
    link.unlink()
    link.symlink_to("second")


def by_renaming(link: Path) -> None:
    other = link.with_name("other")
    other.symlink_to("second")
    other.rename(link)


def by_moving_aside(link: Path) -> None:
    aside = link.with_name("aside")
    link.rename(aside)
    link.symlink_to("second")
    aside.unlink()


REPLACINGS = pytest.mark.parametrize("replace", [by_unlinking, by_renaming, by_moving_aside])


@REPLACINGS
def test_a_link_that_is_replaced_leads_elsewhere_at_once(link: Path, replace: Callable[[Path], None]) -> None:
    for _ in range(5):  # with the inode number of the first, and of the one before
        replace(link)
        assert os.readlink(link) == "second"
        link.unlink()
        link.symlink_to(LONG)
        assert os.readlink(link) == LONG


@REPLACINGS
@pytest.mark.parametrize("mount", ["shared"], indirect=True)
def test_a_link_that_is_replaced_behind_the_mount_leads_elsewhere(
    mount: Mounted, link: Path, replace: Callable[[Path], None]
) -> None:
    replace(mount.backing / link.name)
    assert until(lambda: os.readlink(link) == "second")


@pytest.mark.takes_engine
def test_a_link_that_somebody_holds_stays_what_it_was(link: Path) -> None:
    fd = os.open(link, os.O_PATH | os.O_NOFOLLOW)
    try:
        by_renaming(link)
        assert os.readlink("", dir_fd=fd) == "first"
        assert os.readlink(link) == "second"
    finally:
        os.close(fd)


def test_another_mount_knows_nothing_of_the_last_one(volume: Path) -> None:
    source = volume / f"again{next(_NUMBERS)}"
    source.mkdir()
    for target in ("first", "second", LONG):
        (source / "link").unlink(missing_ok=True)
        (source / "link").symlink_to(target)
        with trashd_mount(source) as mounted:
            assert os.readlink(mounted.path / "link") == target


def test_the_drop_link_follows_its_users_folder(mount: Mounted) -> None:
    drop, store = mount.path / ".trashd/drop", mount.backing / ".trashd"
    assert as_user(ALICE, lambda: os.readlink(drop)) == f"u/{ALICE}/drop"
    (store / "u" / str(ALICE)).chmod(0o750)
    as_user(BOB, lambda: os.makedirs(store / "new" / str(ALICE) / "drop"))
    target = as_user(ALICE, lambda: os.readlink(drop))
    assert target.startswith(f"u/{ALICE}.")
    assert as_user(ALICE, lambda: os.stat(drop).st_uid) == ALICE
    shutil.rmtree(store / "u" / str(ALICE))
    shutil.rmtree(store / target.rpartition("/")[0])
    assert as_user(ALICE, lambda: os.readlink(drop)) == f"u/{ALICE}/drop"
