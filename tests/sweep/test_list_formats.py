"""Lists as Storage Scale writes them: read as its manual says, or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote_from_bytes

import pytest

from fusefs.core.metadata_cache import Listed, ListedName, ListFormat
from fusefs.core.record import Failure
from fusefs.core.results import ANOTHER, UNCLEAR, Spared, SweepSums
from fusefs.sweep.names_from_list import read_list
from tests.support.make_trees import make_tree
from tests.support.run_sweep import names, sweep

pytestmark = pytest.mark.needs("root")

POLICY = ListFormat.MMAPPLYPOLICY


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "list"


def read(file: Path, *lines: bytes) -> list[Listed]:
    file.write_bytes(b"".join(line + b"\n" for line in lines))
    with file.open("rb") as opened:
        return list(read_list(opened.fileno(), POLICY))


def unclear(line: bytes) -> ListedName:
    return ListedName(line, is_understood=False)


# Storage Scale: `InodeNumber GenNumber SnapId [OptionalShowArgs] -- FullPathToFile`.


@pytest.mark.parametrize(
    ("line", "path"),
    [
        (b"40961 65538 0  -- %2Fgpfs%2Ffs1%2Fa%20b", b"/gpfs/fs1/a b"),
        (b"40961 65538 0 -- /gpfs/fs1/a%0Ab", b"/gpfs/fs1/a\nb"),
        (b"40961 65538 0 1024%20alice -- /gpfs/fs1/100%25", b"/gpfs/fs1/100%"),
        (b"40961 65538 0 a b -- /gpfs/fs1/%2d%2D%ff", b"/gpfs/fs1/--\xff"),
    ],
)
def test_a_policys_line_tells_path_and_inode(file: Path, line: bytes, path: bytes) -> None:
    assert read(file, line) == [ListedName(path, 40961)]


@pytest.mark.parametrize(
    "line",
    [
        b"/gpfs/fs1/a",
        b"1 2 -- /gpfs/fs1/a",
        b"1 2 3 gpfs/fs1/a",
        b"1 2 3 -- gpfs/fs1/a",
        b"1 2 3 -- /gpfs/100%",
        b"1 2 3 -- /gpfs/%zz",
        b"1 2 3 -- /gpfs/a%00b",
        b"x 2 3 -- /gpfs/a",
        b"1 2 3 show -- /etc -- /gpfs/a",
    ],
)
def test_what_is_no_policys_line_is_not_understood(file: Path, line: bytes) -> None:
    assert read(file, line) == [unclear(line)]


def test_every_name_comes_through_a_policys_escape(file: Path) -> None:
    odd = [b"/gpfs/" + bytes([byte]) + b" -- /x" for byte in range(1, 256) if byte != ord("/")]
    lines = [b"7 1 0 -- " + quote_from_bytes(path, safe="").encode() for path in odd]
    assert read(file, *lines) == [ListedName(path, 7) for path in odd]


# What is done with them.


def swept_from(file: Path, top: Path, lines: Sequence[bytes]) -> tuple[SweepSums, tuple[object, ...]]:
    file.write_bytes(b"".join(line + b"\n" for line in lines))
    with file.open("rb") as opened:
        swept = sweep(top, names=read_list(opened.fileno(), POLICY))
    return swept.sums, (*swept.failures, *swept.spared)


def line_of(path: Path, ino: int | None = None) -> bytes:
    return b"%d 1 0 -- %b" % (path.stat().st_ino if ino is None else ino, quote_from_bytes(bytes(path)).encode())


def test_a_name_that_another_file_has_by_now_is_left_and_told(volume: Path, file: Path) -> None:
    top = make_tree(volume / "top", {"a b": "", "d": {"c": "", "e": ""}})
    lines = [line_of(top / "a b"), line_of(top / "d/c", 1), line_of(top / "d/e")]
    sums, told = swept_from(file, top, lines)
    assert (sums.n_done, told, names(top)) == (2, (Spared(b"d/c", ANOTHER),), {"d", "d/c"})


def test_a_line_that_is_not_understood_is_a_failure_and_the_others_are_done(volume: Path, file: Path) -> None:
    top = make_tree(volume / "top", {"a": "", "b": ""})
    sums, told = swept_from(file, top, [line_of(top / "a"), b"b", line_of(top / "b", 5)])
    assert (sums.n_done, told[0]) == (1, Failure(b"b", errno.EINVAL, UNCLEAR))


def test_a_listed_path_outside_is_a_failure(volume: Path, file: Path) -> None:
    top = make_tree(volume / "top", {"a": ""})
    (volume / "x").touch()
    assert swept_from(file, top, [line_of(volume / "x")])[0] == SweepSums(n_failed=1)
    assert (volume / "x").exists()


def test_formats_are_read_as_they_come() -> None:
    reader, writer = os.pipe()
    with open(reader, "rb") as out, open(writer, "wb", buffering=0) as into:
        into.write(b"1 2 0 -- /gpfs/a\n1 2 0 -- /gp")
        listed = read_list(out.fileno(), POLICY)
        assert next(listed) == ListedName(b"/gpfs/a", 1)
        into.close()
        assert list(listed) == [ListedName(b"/gp", 1)]
