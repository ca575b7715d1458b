"""What the kernel answers without us is as old as the table in docs/explain/mount-semantics.md says, never older."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.foreground_mount import SHARED_LIMIT_S, Mounted, fresh_mount, until
from tests.support.other_users import as_user
from tests.support.real_filesystems import volume_of

pytestmark = pytest.mark.needs("root", "fuse")

HE = 72_001
N_LOOKS = 20
_TABLE = "| cached by the kernel |"


class Row(NamedTuple):
    """What is changed behind the mount, and what is told of it then."""

    change: Callable[[Path], object]
    tell: Callable[[Path], object]


def replace_link(top: Path) -> None:
    (top / "to come").symlink_to("elsewhere")
    (top / "to come").rename(top / "link")


def may_pass(top: Path) -> bool:
    try:
        as_user(HE, lambda: (top / "directory" / "inside").stat() and None)
    except PermissionError:
        return False
    return True


def write_in_place(top: Path) -> None:
    with (top / "file").open("r+b") as file:
        file.write(b"CONTENT")


ROWS = {
    "names, missing names": Row(
        lambda top: (top / "file").rename(top / "new"),
        lambda top: ((top / "file").exists(), (top / "new").exists()),
    ),
    "permission to list and pass a directory": Row(lambda top: (top / "directory").chmod(0o700), may_pass),
    "attributes": Row(lambda top: (top / "file").chmod(0o604), lambda top: (top / "file").stat().st_mode),
    "attributes of files with several links, and of a directory that has just changed": Row(
        lambda top: (top / "hard").chmod(0o604), lambda top: (top / "linked").stat().st_mode
    ),
    "attributes of set-id programs, and of files open for writing with passthrough": Row(
        lambda top: os.chown(top / "program", HE, HE),
        lambda top: ((top / "program").stat().st_mode, (top / "program").stat().st_uid),
    ),
    "listings": Row(
        lambda top: (top / "directory" / "more").touch(), lambda top: sorted(os.listdir(top / "directory"))
    ),
    "targets of links": Row(replace_link, lambda top: (top / "link").readlink()),
    "file pages": Row(write_in_place, lambda top: (top / "file").read_bytes()),
}


def make(top: Path) -> None:
    top.mkdir()
    (top / "directory").mkdir()
    (top / "directory" / "inside").touch()
    (top / "file").write_bytes(b"content")
    (top / "program").touch()
    (top / "program").chmod(0o4755)
    (top / "linked").write_bytes(b"content")
    os.link(top / "linked", top / "hard")
    (top / "link").symlink_to("file")


@pytest.fixture(scope="module", params=["tmpfs", "overlay"])
def mounted(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    options = ("coherence=shared", "passthrough=off")
    with fresh_mount(*options, made=volume_of(request.param), limit_s=SHARED_LIMIT_S) as mounted:
        yield mounted


@pytest.mark.parametrize("row", ROWS)
def test_what_the_kernel_answers_alone_is_no_older_than_it_may_be(mounted: Mounted, own_name: str, row: str) -> None:
    seen, behind = mounted.path / own_name, mounted.backing / own_name
    make(behind)
    assert until(seen.is_dir)
    change, tell = ROWS[row]
    assert tell(seen) == tell(behind)
    change(behind)
    now = tell(behind)
    assert until(lambda: tell(seen) == now)
    assert [tell(seen) for _ in range(N_LOOKS)] == [now] * N_LOOKS


def test_the_table_has_these_rows() -> None:
    text = (Path(__file__).parents[2] / "docs/explain/mount-semantics.md").read_text()
    _head, _rule, *lines = text[text.index(_TABLE) :].partition("\n\n")[0].splitlines()
    assert {re.split(r" *\| *", line)[1] for line in lines} == set(ROWS)
