"""Names from a list: only those, told as they are; lists that are none; and lists of any length in bounded memory."""

import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import quote_from_bytes

import pytest

from fusefs.core.pacing import HOLD, UNLIMITED, Speed
from fusefs.core.record import Failure
from fusefs.core.results import OTHER_INODE, UNCLEAR, Spared, SweepSums
from fusefs.core.selection import ListedName, ListedPath, ListFormat, Selection
from fusefs.linux.kernel import RefusedNames
from fusefs.sweep.names_from_list import BrokenList, read_list, read_names
from fusefs.sweep.request import ActionPlace, SweepOptions, ToPrint, ToTrash
from tests.support.make_trees import Symlink, fill, make_tree
from tests.support.peak_usage import beside_small_parent
from tests.support.run_sweep import ALL, EVERY_KIND, names, sweep
from tests.support.trashd_command import TRASHD

pytestmark = pytest.mark.needs("root")


LOGS = Selection(names=("*.log",))


def listed(*paths: str) -> Iterator[bytes]:
    return map(os.fsencode, paths)


def test_only_what_is_listed_goes(volume: Path) -> None:
    top = make_tree(volume / "top", {"a.log": "", "d": {"b.log": "", "c.log": "", "e": {}}, "x.txt": ""})
    swept = sweep(top, LOGS, names=listed("d/b.log", "./d//c.log", str(top / "a.log"), "d/gone.log", "x.txt", "d/e"))
    assert (swept.sums.n_done, swept.sums.n_missing, swept.failures) == (3, 1, ())
    assert names(top) == {"d", "d/e", "x.txt"}


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "d/../../x", "d/../a.log"])
def test_a_name_outside_is_told(volume: Path, path: str) -> None:
    top = make_tree(volume / "top", {"a.log": "", "d": {}})
    swept = sweep(top, ALL, names=listed(path, "a.log"))
    assert (swept.sums.n_done, swept.sums.n_failed) == (1, 1)


@pytest.mark.parametrize("path", ["", ".", "./", "{top}", "{top}/."])
def test_the_directory_itself_is_listed_in_vain(volume: Path, path: str) -> None:
    top = make_tree(volume / "top", {"a.log": "", "d": {}})
    swept = sweep(top, EVERY_KIND, names=listed(path.format(top=top)))
    assert (swept.sums, names(top)) == (SweepSums(), {"a.log", "d"})


def test_a_link_on_the_way_to_a_listed_name_is_told(volume: Path) -> None:
    make_tree(volume / "outside", {"f": ""})
    top = make_tree(volume / "top", {"link": Symlink(str(volume / "outside")), "g": ""})
    swept = sweep(top, ALL, names=listed("link/f", "g", "link/sub/f"))
    told = (Failure(b"link", errno.ENOTDIR, "open"), Failure(b"link/sub", errno.ELOOP, "open"))
    assert (swept.sums.n_done, swept.failures) == (1, told)
    assert names(volume / "outside") == {"f"}


def test_a_listed_name_below_what_is_excluded_stays(volume: Path) -> None:
    top = make_tree(volume / "top", {"keep": {"d": {"f": ""}}, ".trashd": {"g": ""}})
    assert sweep(top, Selection(excludes=("keep",)), names=listed("keep/d/f", ".trashd/g")).sums.n_done == 0
    assert len(names(top)) == 5


def test_a_list_is_begun_with_before_it_ends(top: Path) -> None:
    fill(top, 5000)
    read: list[int] = []

    def paths() -> Iterator[bytes]:
        for n in range(5000):
            read.append(n)
            yield b"f%d" % n

    first: list[int] = []
    swept = sweep(
        top, ALL, names=paths(), wishes=SweepOptions(progress=lambda _sums: first.append(len(read))), n_workers=1
    )
    assert swept.sums.n_done == 5000
    assert first[0] < 2000


def test_names_of_a_directory_have_their_turn_in_the_list_s_order(top: Path) -> None:
    fill(top, 3000)
    paths = [f"f{n * 7 % 3000}" for n in range(3000)]
    messages: list[str] = []

    def tell(_here: ActionPlace, names: Sequence[str]) -> RefusedNames:
        messages.extend(names)
        return []

    sweep(top, ALL, ToPrint(tell), names=listed(*paths), n_workers=1)
    assert messages == paths


def test_a_list_in_no_order_takes_no_slice_a_name(volume: Path) -> None:
    top = make_tree(volume / "top", {f"d{n}": {"f": "", "g": ""} for n in range(1000)})
    slices: list[SweepSums] = []
    paths = [f"d{n}/{name}" for name in "fg" for n in range(1000)]
    swept = sweep(top, ALL, names=listed(*paths), wishes=SweepOptions(progress=slices.append), n_workers=1)
    assert swept.sums.n_done == 2000
    assert len(slices) < 200


def test_late_names_are_asked_for_when_they_can_be_acted_on(top: Path) -> None:
    fill(top, 5)
    asked: list[int] = []

    def paths() -> Iterator[bytes]:
        for n in range(5):
            asked.append(n)
            yield b"f%d" % n

    halting = Halting(lambda: (len(asked), 5 - len(os.listdir(top))))
    assert sweep(top, ALL, names=paths(), late=True, wishes=SweepOptions(halting), n_workers=1).sums.n_done == 5
    # A slice whose time is over before it acts asks for a name, which the next slice acts on: the first look counts.
    first = {n_gone: n_asked for n_asked, n_gone in reversed(halting.seen)}
    assert [first[n] for n in range(5)] == [*range(5)]


class Halting:
    """Lets nothing be done before each slice until the test has waited, which then looks."""

    def __init__(self, look: Callable[[], tuple[int, int]]) -> None:
        self.look = look
        self.seen: list[tuple[int, int]] = []
        self.holds = True

    def tempo(self) -> Speed:
        return HOLD if self.holds else UNLIMITED

    def record_work(self, _n_entries: int, _n_bytes: int, _busy_s: float) -> None:
        self.holds = True

    def wait(self, _seconds: float) -> None:
        self.seen.append(self.look())
        self.holds = False


def test_a_list_that_breaks_off_is_a_stop_that_tells_what_was_done(volume: Path) -> None:
    top = make_tree(volume / "top", {"d": {"f": "", "g": ""}, "e": {"h": ""}})

    def broken() -> Iterator[bytes]:
        yield from (b"d/f", b"e/h")
        raise BrokenList("the disk says no")

    swept = sweep(top, ALL, ToTrash(), names=broken())
    assert (swept.sums.n_done, swept.is_stopped, swept.why) == (
        2,
        True,
        "the rest of the list was ignored: the disk says no",
    )
    assert [path.name for path in volume.glob(".trashd/u/0/orphans/*")] == [swept.orphan]


def test_what_is_not_there_at_the_first_look_is_missing_and_nothing_vanished(volume: Path) -> None:
    top = make_tree(volume / "top", {"d": {"f": ""}})
    swept = sweep(top, ALL, names=listed("d/f", "d/no", "no/f", "no/g"))
    assert (swept.sums, names(top)) == (SweepSums(n_seen=1, n_matched=1, n_done=1, n_missing=3), {"d"})


@pytest.mark.parametrize("end", [b"\n", b"\0"])
def test_a_list_that_the_kernel_can_not_read_is_broken(end: bytes) -> None:
    with Path("/proc/self/mem").open("rb", buffering=0) as file, pytest.raises(BrokenList, match="Input/output error"):
        next(read_names(file.fileno(), end))


# Lists as Storage Scale writes them: read as its manual says, or not at all


POLICY = ListFormat.MMAPPLYPOLICY


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "list"


def read(file: Path, *lines: bytes) -> list[ListedPath]:
    file.write_bytes(b"".join(line + b"\n" for line in lines))
    with file.open("rb") as opened:
        return list(read_list(opened.fileno(), POLICY))


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
    assert read(file, line) == [ListedName(line, is_understood=False)]


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
    assert (sums.n_done, told, names(top)) == (2, (Spared(b"d/c", OTHER_INODE),), {"d", "d/c"})


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


N_USUAL = 100_000
N_NAMES = int(os.environ.get("TRASHD_TEST_NAMES", N_USUAL))
N_FEW = 10_000
GROWTH_MAX_KIB = 4 * 1024  # less than half of what the names would take; two runs differ by a MiB or two
WRITERS = {
    "in-order": ("nul", 'b"%b/d%06d/f%06d\\0" % (top, n // 1000, n)'),
    "in-no-order": ("nul", 'b"%b/d%03d/f%06d\\0" % (top, n % 1000, n)'),
    "mmapplypolicy": ("mmapplypolicy", 'b"%d 65538 0 show -- %b/d%%20%06d/f%06d\\n" % (n + 1, top, n // 1000, n)'),
}


def peak_kib(top: Path, writer: str, n_names: int, *words: str) -> int:
    """The most memory of a sweep's first process that reads so many names, of which none is there."""
    how, line = WRITERS[writer]
    code = f"import sys; top = sys.argv[1].encode(); sys.stdout.buffer.writelines({line} for n in range({n_names}))"
    command = [TRASHD, "sweep", str(top), "--delete", "--from", "-", "--from-format", how, *words]
    with subprocess.Popen([sys.executable, "-c", code, str(top)], stdout=subprocess.PIPE) as lists:
        swept = beside_small_parent(command)
        done = subprocess.run(swept, stdin=lists.stdout, capture_output=True, text=True, check=False)
    assert f"  {n_names:,} listed paths not found" in done.stdout
    return int(done.stderr.splitlines()[-1])


@pytest.mark.timeout(600 if N_NAMES <= N_USUAL else 0)
@pytest.mark.parametrize("writer", WRITERS)
def test_a_long_list_takes_no_more_memory_than_a_short_one(volume: Path, writer: str) -> None:
    few, many = (peak_kib(volume, writer, n) for n in (N_FEW, N_NAMES))
    print(f"{writer}: {N_NAMES:,} names: {many:,} KiB; {N_FEW:,}: {few:,} KiB")
    assert many - few < GROWTH_MAX_KIB


@pytest.mark.timeout(600 if N_NAMES <= N_USUAL else 0)
def test_a_long_list_that_is_counted_first_is_not_kept_in_memory(volume: Path) -> None:
    few, many = (peak_kib(volume, "in-order", n, "--confirm-above", "1") for n in (N_FEW, N_NAMES))
    assert many - few < GROWTH_MAX_KIB


@pytest.mark.timeout(600 if N_NAMES <= N_USUAL else 0)
def test_a_list_that_is_counted_first_is_acted_on_from_its_beginning(volume: Path) -> None:
    names = [f"f{n}" for n in range(100)]
    for name in names:
        (volume / name).touch()
    command = [TRASHD, "sweep", str(volume), "--delete", "--from", "-", "--confirm-above", "1000"]
    done = subprocess.run(command, input="\n".join(names), cwd=volume, capture_output=True, text=True, check=True)
    assert re.search(r"100 matches .*deleted", done.stdout)
    assert not [*volume.glob("f*")]
