"""find itself is the oracle: whatever the tree and whatever is asked, the same entries, each of them once."""

import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusefs.core.selection import KINDS, Field, Selection, SizeBound, TimeBound
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.store.walk import SeenDirectories
from fusefs.sweep.request import Request, TakingBoundary, ToDelete
from fusefs.sweep.run_sweep import run_request
from tests.support.run_sweep import printed

MOMENT_S = 1_700_000_000
SECOND_NS = 10**9
OWNERS = (0, 1, 54_321)
N_SIZES, N_MOMENTS = 5, 4
_PLAIN = [b"a", b"b", b"A", b"1", b".log", b".", b"-", b"\n", b" ", b"*", b"[", b"]", b"\\", b"?", b"'", b"~"]
INVALID = [*_PLAIN, b"\xff", b"\xfe"]
"""Parts of names that are ASCII, or no UTF-8."""
FOREIGN = [*_PLAIN, "é".encode(), "Ж".encode(), "ж".encode(), "字".encode()]
"""Parts of names that are UTF-8."""
_NAME_MAX = 255


class Odd(NamedTuple):
    """One entry.

    parent  which of the directories before it holds it; if there are so many, else the top
    kind    as find's -type
    moment  of its times: so many seconds, and nanoseconds, after MOMENT_S; the access a moment later
    """

    parent: int
    name: bytes
    kind: str
    size: int
    moment: int
    owner: int


def odd_trees(parts: Sequence[bytes]) -> st.SearchStrategy[list[Odd]]:
    """A few entries with names of such parts."""
    short = st.lists(st.sampled_from(parts), min_size=1, max_size=5).map(b"".join)
    entry = st.builds(
        Odd,
        st.integers(0, 5),
        (short | short | short.map(_longest)).filter(lambda name: name not in (b".", b"..")),
        st.sampled_from("fffffddddlps"),
        st.integers(0, N_SIZES),
        st.integers(0, N_MOMENTS),
        st.sampled_from(OWNERS),
    )
    return st.lists(entry, max_size=14)


def _longest(name: bytes) -> bytes:
    return (name * (_NAME_MAX // len(name))).ljust(_NAME_MAX, b"a")


def moment_ns(moment: int) -> int:
    """What an entry's time is."""
    return (MOMENT_S + moment) * SECOND_NS + moment


def make_tree(top: Path, entries: Sequence[Odd]) -> None:
    """Make them below a directory; the second of a name is left out."""
    directories = [os.fsencode(top)]
    made: dict[bytes, Odd] = {}
    for entry in entries:
        above = directories[entry.parent] if entry.parent < len(directories) else directories[0]
        path = os.path.join(above, entry.name)
        if path not in made:
            _make(path, entry)
            made[path] = entry
            directories += [path] * (entry.kind == "d")
    for path, entry in reversed(made.items()):
        os.utime(path, ns=(moment_ns(entry.moment + 1), moment_ns(entry.moment)), follow_symlinks=False)
        if os.geteuid() == 0:
            os.chown(path, entry.owner, OWNERS[entry.owner == 0], follow_symlinks=False)


def _make(path: bytes, entry: Odd) -> None:
    match entry.kind:
        case "d":
            os.mkdir(path)
        case "l":
            os.symlink(b"." * max(entry.size, 1), path)
        case "p":
            os.mkfifo(path)
        case "s":
            os.mknod(path, stat.S_IFSOCK | 0o600)
        case _:
            Path(os.fsdecode(path)).write_bytes(b"x" * entry.size)


LETTER_OF: dict[Field, str] = {"mtime": "m", "atime": "a", "ctime": "c", "btime": "B"}
ALL_BUT_DIRECTORIES = sorted({*KINDS} - {"d"})


class Asked(NamedTuple):
    selection: dict[str, Any]
    find: Sequence[bytes | str]


def found(top: Path, asked: Sequence[Asked], locale: str) -> list[bytes]:
    """What find prints, without its `./`."""
    words = [word for one in asked for word in one.find]
    excludes = [os.fsencode(text) for one in asked for text in one.selection.get("excludes", ())]
    left_out = [word for text in excludes for word in ("-o", "-path", b"./" + text) if b"/" in text]
    left_out += [word for text in excludes for word in ("-o", "-name", text) if b"/" not in text]
    kinds = [] if any("types" in one.selection or "empty" in one.selection for one in asked) else ["!", "-type", "d"]
    words = ["(", "-false", *left_out, ")", "-prune", "-o", *kinds, *words, "-print0"]
    done = subprocess.run(
        ["find", ".", "-mindepth", "1", *words],
        cwd=top,
        env={**os.environ, "LC_ALL": locale},
        capture_output=True,
        check=True,
    )
    return sorted(path.removeprefix(b"./") for path in done.stdout.split(b"\0") if path)


def selection_of(asked: Sequence[Asked]) -> Selection:
    """All of it: what is a tuple grows, kinds are those that all have."""
    return reduce(_with, (one.selection for one in asked), Selection())


def _with(selection: Selection, more: dict[str, Any]) -> Selection:
    for field, value in more.items():
        before = getattr(selection, field)
        if field == "types" and before:
            value = before & value or frozenset("b")  # of which no tree has any: what has no kind is of all kinds
        elif field == "min_depth":
            value = max(before, value)
        elif field == "max_depth":
            value = value if before is None else min(before, value)
        elif isinstance(value, tuple):
            value = (*before, *value)
        selection = selection._replace(**{field: value})
    return selection


def escaped(text: bytes) -> bytes:
    return re.sub(rb"([*?\[\\])", rb"\\\1", text)


def globs(parts: Sequence[bytes], *others: bytes) -> st.SearchStrategy[bytes]:
    """Those that find takes as it should: with names beyond ASCII glibc 2.36 counts bytes besides characters."""
    wild = [b"*", b"*", b"*"]
    if parts is INVALID:
        wild += [b"?", b"?", b"[a-b]", b"[!a]", b"[^1]", b"[[:alpha:]]", b"[![:punct:]]", b"[]*]", b"[\\]-]"]
    pieces = st.sampled_from([*map(escaped, parts), *others]) | st.sampled_from(wild)
    return st.lists(pieces, min_size=1, max_size=5).map(b"".join)


def regexes(parts: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """What Python and find's own kind of regular expression both mean."""
    plain = [part for part in parts if part.isalnum() or part == b"\n"]
    wild = [b".*", b".*", b"[ab]", b"[^a]*", b"/", *([b"."] if parts is INVALID else [])]
    return st.lists(st.sampled_from([*plain, *wild, b"[.]", b"1*"]), min_size=1, max_size=5).map(b"".join)


def questions(parts: Sequence[bytes]) -> st.SearchStrategy[Asked]:
    name = globs(parts)
    path = globs(parts, b"/", b"/", b"*/")
    return st.one_of(
        name.map(lambda glob: Asked({"names": (os.fsdecode(glob),)}, ["-name", glob])),
        name.map(lambda glob: Asked({"inames": (os.fsdecode(glob),)}, ["-iname", glob])),
        path.map(lambda glob: Asked({"paths": (os.fsdecode(glob),)}, ["-path", b"./" + glob])),
        regexes(parts).map(matched),
        (name | path).map(lambda glob: Asked({"excludes": (os.fsdecode(glob),)}, [])),
        st.sets(st.sampled_from(KINDS), min_size=1, max_size=3).map(lambda kinds: of_kinds(*kinds)),
        st.builds(sized, st.integers(0, N_SIZES), st.sampled_from("+- ")),
        st.builds(timed, st.sampled_from(["mtime", "atime"]), st.integers(0, N_MOMENTS + 1), st.booleans()),
        st.sampled_from(OWNERS).map(lambda uid: Asked({"uids": (uid,)}, ["-uid", str(uid)])),
        st.sampled_from(OWNERS).map(lambda gid: Asked({"gids": (gid,)}, ["-gid", str(gid)])),
        st.just(Asked({"empty": True}, ["-empty"])),
        st.integers(2, 3).map(lambda depth: Asked({"min_depth": depth}, ["-path", "./*" + "/*" * (depth - 1)])),
        st.integers(1, 3).map(lambda depth: Asked({"max_depth": depth}, ["!", "-path", "./*" + "/*" * depth])),
    )


def matched(regex: bytes) -> Asked:
    """By a regular expression of which a `.` is a newline too."""
    return Asked({"regexes": (os.fsdecode(regex),)}, ["-regextype", "findutils-default", "-regex", b"[.]/" + regex])


def sized(size: int, sign: str) -> Asked:
    bound = {"+": SizeBound(size + 1), "-": SizeBound(0, size - 1), " ": SizeBound(size, size)}[sign]
    return Asked({"sizes": (bound,)}, ["-size", f"{sign.strip()}{size}c"])


def of_kinds(*kinds: str) -> Asked:
    return Asked({"types": frozenset(kinds)}, ["-type", ",".join(kinds)])


def timed(field: Field, moment: int, is_after: bool) -> Asked:
    """Later or earlier than entries are. Directories are left out of what asks for atimes: both sides list them."""
    asked = during(field, moment_ns(moment), is_after=is_after)
    return plus(of_kinds(*ALL_BUT_DIRECTORIES), asked) if field == "atime" else asked


def plus(one: Asked, other: Asked) -> Asked:
    return Asked({**one.selection, **other.selection}, [*one.find, *other.find])


def during(field: Field, bound_ns: int, *, is_after: bool) -> Asked:
    if is_after:
        return Asked({"times": (TimeBound(field, after_ns=bound_ns),)}, newer(field, bound_ns))
    return Asked({"times": (TimeBound(field, before_ns=bound_ns),)}, ["!", *newer(field, bound_ns - 1)])


def newer(field: Field, ns: int) -> list[str]:
    return [f"-newer{LETTER_OF[field]}t", f"@{ns // SECOND_NS}.{ns % SECOND_NS:09}"]


Case = tuple[list[Odd], list[Asked]]


def cases(parts: Sequence[bytes]) -> st.SearchStrategy[Case]:
    return st.tuples(odd_trees(parts), st.lists(questions(parts), max_size=4))


@contextmanager
def a_tree(base: Path, entries: Sequence[Odd]) -> Iterator[Path]:
    top = Path(tempfile.mkdtemp(dir=base))
    try:
        make_tree(top, entries)
        yield top
    finally:
        shutil.rmtree(os.fsencode(top))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trees")


@given(case=cases(INVALID))
def test_what_find_finds_among_names_that_are_no_utf_8(base: Path, case: Case) -> None:
    entries, asked = case
    with a_tree(base, entries) as top:
        assert sorted(printed(top, selection_of(asked))) == found(top, asked, "C")


@given(case=cases(FOREIGN))
def test_what_find_finds_among_names_beyond_ascii(base: Path, case: Case) -> None:
    entries, asked = case
    with a_tree(base, entries) as top:
        assert sorted(printed(top, selection_of(asked))) == found(top, asked, "C.UTF-8")


class AllSeen(SeenDirectories):
    """What an earlier run has seen: find knows no boundary between users."""

    def was_there(self, _kernel: Kernel, _fd: Fd, _whose: int) -> bool:
        return True


@settings(max_examples=30)
@given(case=cases(INVALID))
def test_what_find_finds_is_deleted_and_nothing_else(base: Path, case: Case) -> None:
    entries, asked = case
    asked = [*asked, of_kinds(*ALL_BUT_DIRECTORIES)]
    with a_tree(base, entries) as top:
        before, meant = found(top, [of_kinds(*KINDS)], "C"), found(top, asked, "C")
        boundary = TakingBoundary(0, AllSeen(frozenset(), Fd(-1)))
        request = Request(os.fsencode(top), selection_of(asked), ToDelete(), n_workers=2, boundary=boundary)
        swept = run_request(Kernel(), request)
        assert (swept.sums.n_done, swept.failures) == (len(meant), ())
        assert found(top, [of_kinds(*KINDS)], "C") == sorted({*before} - {*meant})


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("nth", range(3))
def test_what_find_finds_by_change_times(tmp_path: Path, nth: int, is_after: bool) -> None:
    for name in "abc":
        (tmp_path / name).touch()
    bound_ns = sorted(os.stat(path).st_ctime_ns for path in tmp_path.iterdir())[nth]
    asked = during("ctime", bound_ns, is_after=is_after)
    assert sorted(printed(tmp_path, selection_of([asked]))) == found(tmp_path, [asked], "C")


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("nth", range(3))
def test_what_stat_tells_of_births(tmp_path: Path, nth: int, is_after: bool) -> None:
    """Of which find knows nothing on this machine."""
    for name in "abc":
        (tmp_path / name).touch()
    completed = subprocess.run(
        ["stat", "--format=%n %.9W", "--", *"abc"], cwd=tmp_path, capture_output=True, check=True
    )
    births = {name: int(birth.replace(b".", b"")) for name, birth in map(bytes.split, completed.stdout.splitlines())}
    bound_ns = sorted(births.values())[nth]
    asked = during("btime", bound_ns, is_after=is_after)
    meant = [name for name, born in births.items() if born and (born > bound_ns if is_after else born < bound_ns)]
    assert sorted(printed(tmp_path, selection_of([asked]))) == meant
