"""Lists as Storage Scale, Robinhood and brindexer write them: read as their manuals and sources say, or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO
from urllib.parse import quote_from_bytes

import pytest

from fusefs.core.listed_names import Listed, ListedName, ListFormat
from fusefs.core.record import Failure
from fusefs.core.sweep_result import ANOTHER, UNCLEAR, Spared, SweepSums
from fusefs.sweep.list_formats import read_listed
from tests.support.make_trees import make_tree
from tests.support.run_sweep import names, sweep

pytestmark = pytest.mark.needs("root")

POLICY, PLAIN, REPORT, INDEX = (
    ListFormat.MMAPPLYPOLICY, ListFormat.MMAPPLYPOLICY_PLAIN, ListFormat.ROBINHOOD, ListFormat.BRINDEXER,
)  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "list"


def read(file: Path, how: ListFormat, *lines: bytes) -> list[Listed]:
    file.write_bytes(b"".join(line + b"\n" for line in lines))
    with file.open("rb") as opened:
        return list(read_listed(opened.fileno(), how))


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
    assert read(file, POLICY, line) == [ListedName(path, 40961)]


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
    assert read(file, POLICY, line) == [unclear(line)]


def test_without_escape_what_could_mean_two_things_is_not_understood(file: Path) -> None:
    both = b"1 2 0 -- /gpfs/a\\nb", b"1 2 0 -- /gpfs/a -- /b"
    clear = b"1 2 0 -- /gpfs/a%41 b"
    assert read(file, PLAIN, *both, clear) == [*map(unclear, both), ListedName(b"/gpfs/a%41 b", 1)]


def test_every_name_comes_through_a_policys_escape(file: Path) -> None:
    odd = [b"/gpfs/" + bytes([byte]) + b" -- /x" for byte in range(1, 256) if byte != ord("/")]
    lines = [b"7 1 0 -- " + quote_from_bytes(path, safe="").encode() for path in odd]
    assert read(file, POLICY, *lines) == [ListedName(path, 7) for path in odd]


# Robinhood 3: rbh-report --dump --csv, some columns and the path at the end.


def test_a_reports_line_tells_the_path_at_its_end(file: Path) -> None:
    lines = [
        b"type,       size,       user,      group,      fileclass, lhsm.status,       path",
        b"file,    1048576,      alice,   projects,          small,  synchro, /lustre/a, /b c",
        b" dir,       4096,       root,       root,               ,        , /lustre/d",
        b"Total: 2 entries, 1052672 bytes (1.00 MB)",
    ]
    assert read(file, REPORT, *lines) == [ListedName(b"/lustre/a, /b c"), ListedName(b"/lustre/d")]


@pytest.mark.parametrize("line", [b"/lustre/a", b"file, 1, alice", b"b, /lustre/a", b"[0x200000401:0x1:0x0]"])
def test_what_is_no_reports_line_is_not_understood(file: Path, line: bytes) -> None:
    assert read(file, REPORT, line) == [unclear(line)]


# brindexer's query: path, size and time, and a summary.


def test_an_indexs_line_tells_the_path_before_its_numbers(file: Path) -> None:
    lines = [b"/lus/a b 3 1580000000", b"/lus/c 4 5 0 -1", b"Total records found:  2", b"", b"Time elapsed:  1.5s"]
    assert read(file, INDEX, *lines) == [ListedName(b"/lus/a b"), ListedName(b"/lus/c 4 5")]


@pytest.mark.parametrize("line", [b"/lus/a", b"/lus/a 3 x", b"lus/a 3 4", b"b 3 4", b"Total records found: many"])
def test_what_is_no_indexs_line_is_not_understood(file: Path, line: bytes) -> None:
    assert read(file, INDEX, line) == [unclear(line)]


# What is done with them.


def swept_from(file: Path, top: Path, how: ListFormat, lines: Sequence[bytes]) -> tuple[SweepSums, tuple[object, ...]]:
    file.write_bytes(b"".join(line + b"\n" for line in lines))
    with file.open("rb") as opened:
        swept = sweep(top, names=read_listed(opened.fileno(), how))
    return swept.sums, (*swept.failures, *swept.spared)


def line_of(path: Path, ino: int | None = None) -> bytes:
    return b"%d 1 0 -- %b" % (path.stat().st_ino if ino is None else ino, quote_from_bytes(bytes(path)).encode())


def test_a_name_that_another_file_has_by_now_is_left_and_told(volume: Path, file: Path) -> None:
    top = make_tree(volume / "top", {"a b": "", "d": {"c": "", "e": ""}})
    lines = [line_of(top / "a b"), line_of(top / "d/c", 1), line_of(top / "d/e")]
    sums, told = swept_from(file, top, POLICY, lines)
    assert (sums.n_done, told, names(top)) == (2, (Spared(b"d/c", ANOTHER),), {"d", "d/c"})


def test_a_line_that_is_not_understood_is_a_failure_and_the_others_are_done(volume: Path, file: Path) -> None:
    top = make_tree(volume / "top", {"a": "", "b": ""})
    sums, told = swept_from(file, top, POLICY, [line_of(top / "a"), b"b", line_of(top / "b", 5)])
    assert (sums.n_done, told[0]) == (1, Failure(b"b", errno.EINVAL, UNCLEAR))


def test_a_listed_path_outside_is_a_failure_in_every_format(volume: Path, file: Path) -> None:
    top = make_tree(volume / "top", {"a": ""})
    (volume / "x").touch()
    path = os.fsencode(volume / "x")
    for how, line in ((POLICY, line_of(volume / "x")), (REPORT, b"file, 1, " + path), (INDEX, path + b" 0 0")):
        assert swept_from(file, top, how, [line])[0] == SweepSums(n_failed=1)
    assert (volume / "x").exists()


def test_formats_are_read_as_they_come() -> None:
    reader, writer = os.pipe()
    with open(reader, "rb") as out, open(writer, "wb", buffering=0) as into:
        into.write(b"1 2 0 -- /gpfs/a\n1 2 0 -- /gp")
        listed = read_listed(out.fileno(), POLICY)
        assert next(listed) == ListedName(b"/gpfs/a", 1)
        _end(into)
        assert list(listed) == [ListedName(b"/gp", 1)]


def _end(file: IO[bytes]) -> None:
    file.close()
