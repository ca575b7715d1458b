"""What C does to many names at a time is what Python does to each: the same names, sizes, errors, kinds."""

import errno
import os
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.core.errors import BadRecord
from fusefs.core.selection import FORMATS, TIMES, Field, Matcher, Selection, SizeBound, TimeBound
from fusefs.core.slices import unpack_names
from fusefs.engine.strategy import in_order
from fusefs.linux import batched_calls, getdents
from fusefs.linux.batched_calls import (
    lstat_all,
    match_by_stat,
    names_that_may_lack,
    read_more,
    read_small_files,
    read_window,
    rename_all_free,
    unlink_all,
    unlink_matching,
)
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel, RefusedNames
from fusefs.store.container import open_record
from fusefs.store.layout import RECORD
from tests.support.real_filesystems import bind_mount, tmpfs_volume

pytestmark = [
    pytest.mark.needs("root"),
    pytest.mark.skipif(batched_calls._bulk is None, reason="it was not built: TRASHD_NATIVE=0"),
]

ODD = ["file", "new\nline", "-dash", "invalid \udcff", "n" * 255, "ünïcode", "a" * 4]
NEAR_S = [0, 1, -1, 1_000_000_000, 2**33]
TIMES_NS = [second * 10**9 + rest for second in NEAR_S for rest in (0, 1, 999_999_999)]
SIZES = [0, 1, 511, 512, 4096, 1 << 31]
OWNERS = [0, 1, 1000, 2**32 - 2]


def opened(directory: Path) -> Fd:
    return Fd(os.open(directory, os.O_RDONLY | os.O_DIRECTORY))


@pytest.fixture(scope="module")
def odd_tree() -> Iterator[Path]:
    """Entries of all kinds, with sizes, times and owners at the edges."""
    with tmpfs_volume() as volume:
        tree = volume / "tree"
        tree.mkdir()
        for n, name in enumerate([*ODD, *(f"f{n}" for n in range(40))]):
            (tree / name).touch()
            os.truncate(tree / name, SIZES[n % len(SIZES)])
            os.chown(tree / name, OWNERS[n % len(OWNERS)], OWNERS[n // 4 % len(OWNERS)])
            os.utime(tree / name, ns=(TIMES_NS[n % len(TIMES_NS)], TIMES_NS[n * 7 % len(TIMES_NS)]))
        (tree / "directory").mkdir()
        (tree / "link").symlink_to("file")
        os.mkfifo(tree / "fifo")
        os.link(tree / "file", tree / "second name")
        with bind_mount(tree / "f1", tree / "f2"), bind_mount(tree, tree / "directory"):
            yield tree


times = st.sampled_from(TIMES_NS) | st.integers(-(1 << 80), 1 << 80)
sizes = st.sampled_from(SIZES) | st.integers(0, 1 << 70)
selections = st.tuples(
    st.frozensets(st.sampled_from(sorted(FORMATS))),
    st.lists(st.builds(SizeBound, sizes, st.none() | sizes), max_size=2).map(tuple),
    st.lists(st.builds(TimeBound, st.sampled_from(TIMES), st.none() | times, st.none() | times), max_size=2).map(tuple),
    st.lists(st.sampled_from(OWNERS), max_size=2).map(tuple),
    st.lists(st.sampled_from(OWNERS), max_size=1).map(tuple),
    st.booleans(),
).map(lambda told: Selection((), (), (), (), (), *told))


@given(selection=selections)
def test_it_chooses_what_the_selection_takes(odd_tree: Path, selection: Selection) -> None:
    matcher, kernel = Matcher(selection), Kernel()
    kinds = {stat.S_IFMT(FORMATS[kind]) >> 12 for kind in matcher.types}
    with opened(odd_tree) as fd:
        names = [*os.listdir(odd_tree), "gone"]
        chosen = match_by_stat(kernel, fd, names, matcher.bounds.packed(kinds), needs_no_server=True)
        looked, _refused = lstat_all(
            kernel, fd, [name for name in names if name not in chosen.unsure], needs_birth=True
        )
    taken = [one for one in looked if one.st_mode >> 12 in kinds and matcher.matches_stat(one, one.btime_ns)]
    assert chosen.names == [one.name for one in taken] or chosen.unsure == names
    if chosen.names:
        spaces = [one.st_blocks * 512 if one.st_nlink == 1 else 0 for one in taken]
        assert chosen.sizes == ([one.st_size for one in taken], spaces)


def test_what_is_mounted_on_or_gone_is_unsure(odd_tree: Path) -> None:
    with opened(odd_tree) as fd:
        chosen = match_by_stat(
            Kernel(),
            fd,
            ["f0", "f2", "directory", "gone", "n" * 256],
            Matcher(Selection()).bounds.packed([8]),
            needs_no_server=True,
        )
    assert (chosen.names, chosen.unsure) == (["f0"], ["f2", "directory", "gone", "n" * 256])


@pytest.mark.parametrize("field", [field for field in TIMES if field != "btime"])
def test_a_time_that_64_bits_do_not_hold_is_left_to_python(field: Field) -> None:
    late = Selection(times=(TimeBound(field, 1 << 63),))
    assert Matcher(late).bounds.packed([8]) is None
    with opened(Path("/proc/self")) as fd:
        assert match_by_stat(Kernel(), fd, ["stat"], None, needs_no_server=True).unsure == ["stat"]


def test_each_look_is_seen_by_who_watches(odd_tree: Path) -> None:
    with opened(odd_tree) as fd:
        bounds = Matcher(Selection()).bounds.packed([8])
        assert match_by_stat(Kernel(lambda _call: None), fd, ["f0"], bounds, needs_no_server=True).unsure == ["f0"]


def test_where_a_server_would_be_asked_nothing_is_told_at_a_glance(odd_tree: Path) -> None:
    with opened(odd_tree) as fd:
        assert match_by_stat(
            Kernel(), fd, ["f0"], Matcher(Selection()).bounds.packed([8]), needs_no_server=False
        ).unsure == ["f0"]


def test_what_is_chosen_goes_at_once_and_nothing_else_does(tmp_path: Path) -> None:
    for n, name in enumerate([*ODD, *(f"f{n}" for n in range(40))]):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, SIZES[n % len(SIZES)])
    (tmp_path / "directory").mkdir()
    names = [*os.listdir(tmp_path), "gone"]
    bounds = Matcher(Selection(sizes=(SizeBound(512),))).bounds.packed([8])
    assert bounds is not None
    with opened(tmp_path) as fd, opened(tmp_path / "directory") as elsewhere:
        chosen = match_by_stat(Kernel(), fd, names, bounds, needs_no_server=True)
        assert unlink_matching(Kernel(lambda _call: None), fd, fd, names, bounds).unsure == names
        refused = unlink_matching(Kernel(), fd, elsewhere, names, bounds)
        assert (refused.n_removed, refused.n_bytes) == (0, 0)
        assert refused.refused == [(name, errno.ENOENT) for name in chosen.names]
        done = unlink_matching(Kernel(), fd, fd, names, bounds)
    assert (done.n_removed, done.refused, done.unsure) == (len(chosen.names), [], ["gone"])
    assert (done.n_bytes, done.taken_bytes) == (sum(chosen.sizes.lengths), sum(chosen.sizes.spaces))
    assert {*os.listdir(tmp_path)} == {*names} - {*chosen.names, "gone"}


def test_it_lists_what_python_lists(odd_tree: Path) -> None:
    with opened(odd_tree) as fd, opened(odd_tree) as other:
        found, expected = read_more(Kernel(), fd), getdents.read_more(other)
        assert found is not None
        assert expected is not None
        assert found._replace(kinds=list(found.kinds)) == expected
        assert read_more(Kernel(), fd) is None


ENDS = [
    (b"f", b""),
    (b"", b"e"),
    (b"fi", b"le"),
    (b"file", b"file"),
    (b"", b"\xff"),
    (b"n" * 255, b""),
    (b"n" * 256, b"n"),
]


@pytest.mark.parametrize(("first", "last"), ENDS)
def test_it_leaves_out_names_with_other_ends_but_no_directory(odd_tree: Path, first: bytes, last: bytes) -> None:
    def is_wanted(name: str, kind: int) -> bool:
        raw = os.fsencode(name)
        return kind == stat.S_IFDIR >> 12 or (raw.startswith(first) and raw.endswith(last))

    with opened(odd_tree) as fd, opened(odd_tree) as other:
        found, whole = read_more(Kernel(), fd, first, last), getdents.read_more(other)
        assert found is not None
        assert whole is not None
        expected = [one for one in zip(whole.names, whole.inos, whole.kinds, strict=True) if is_wanted(one[0], one[2])]
        assert [*zip(found.names, found.inos, found.kinds, strict=True)] == expected
        assert found.text == "/".join(found.names)
        assert found.n_seen == len(whole.names)
        assert read_more(Kernel(), fd, first, last) is None


def test_it_lists_many_block_by_block(tmp_path: Path) -> None:
    names = {f"{n:0200d}" for n in range(2000)}
    for name in names:
        (tmp_path / name).touch()
    found: list[str] = []
    with opened(tmp_path) as fd:
        while (block := read_more(Kernel(), fd)) is not None:
            assert len(block.names) == len(block.inos) == len(block.kinds)
            found += block.names
    assert len(found) == len(names)
    assert set(found) == names


def test_a_listing_of_no_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with Fd(os.open(tmp_path / "file", os.O_RDONLY)) as fd, pytest.raises(NotADirectoryError):
        read_more(Kernel(), fd)


@pytest.mark.parametrize("by_inode", [True, False])
def test_a_window_has_what_python_lists_in_the_order_in_which_it_goes(tmp_path: Path, by_inode: bool) -> None:
    for name in [*ODD, *(f"{n}" for n in range(9000))]:
        (tmp_path / name).touch()
    for n in range(20):
        (tmp_path / f"sub\udcff{n}").mkdir()
    with opened(tmp_path) as fd:
        os.lseek(fd, 0, os.SEEK_END)
        window = read_window(Kernel(), fd, 1 << 20, 1 << 20, by_inode=by_inode)
        with Kernel().scan(fd) as scanned:
            entries = list(scanned)
    files = [entry for entry in entries if not entry.is_dir()]
    expected = in_order([entry.name for entry in files], [entry.inode() for entry in files], by_inode=by_inode)
    assert window is not None
    assert window.is_all
    assert [name for bundle in window.bundles for name in unpack_names(bundle)] == expected
    assert sorted(window.subdirs) == sorted(entry.name for entry in entries if entry.is_dir())


@pytest.mark.parametrize(("most", "most_bytes", "n"), [(100, 1 << 20, 100), (1 << 20, 30, 10), (1000, 3000, 1000)])
def test_a_window_ends_at_its_bounds_and_tells_whether_more_is_left(
    tmp_path: Path, most: int, most_bytes: int, n: int
) -> None:
    for number in range(1000):
        (tmp_path / f"{number:03}").touch()
    with opened(tmp_path) as fd:
        window = read_window(Kernel(), fd, most, most_bytes, by_inode=True)
    assert window is not None
    assert sum(len(unpack_names(bundle)) for bundle in window.bundles) == n
    assert window.is_all == (n == 1000)


def test_a_window_of_no_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with Fd(os.open(tmp_path / "file", os.O_RDONLY)) as fd, pytest.raises(NotADirectoryError):
        read_window(Kernel(), fd, 10, 10, by_inode=True)


@pytest.mark.parametrize("remove", [unlink_all, partial(unlink_all, are_dirs=True)])
def test_it_refuses_what_python_refuses(
    tmp_path: Path, remove: Callable[[Kernel, int, list[str]], RefusedNames], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    for directory, bulk in (("c", batched_calls._bulk), ("python", None)):
        monkeypatch.setattr(batched_calls, "_bulk", bulk)
        (tmp_path / directory / "sub" / "full").mkdir(parents=True)
        (tmp_path / directory / "empty").mkdir()
        for name in ODD:
            (tmp_path / directory / name).touch()
        with opened(tmp_path / directory) as fd:
            refused = remove(Kernel(), fd, [*ODD, "gone", "sub", "empty", "n" * 256])
        told.append((refused, sorted(os.listdir(tmp_path / directory))))
    assert told[0] == told[1]


def test_it_moves_what_python_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    for directory, bulk in (("c", batched_calls._bulk), ("python", None)):
        monkeypatch.setattr(batched_calls, "_bulk", bulk)
        source, target = tmp_path / directory, tmp_path / f"{directory} to"
        (source / "sub" / "full").mkdir(parents=True)
        (target / "sub").mkdir(parents=True)
        for name in ODD:
            (source / name).touch()
        (target / "file").write_text("somebody's")
        with opened(source) as old, opened(target) as new:
            refused = rename_all_free(Kernel(), old, new, [*ODD, "gone", "sub", "n" * 256])
        told.append((refused, sorted(os.listdir(source)), sorted(os.listdir(target)), (target / "file").read_text()))
    assert told[0] == told[1]


@pytest.fixture
def containers(tmp_path: Path) -> Iterator[Path]:
    """Directories with a record each, of which some are not what trashd makes."""
    for name in (
        "plain",
        "empty",
        "large",
        "others",
        "second name",
        "written by others",
        "fifo",
        "link",
        "mounted",
        "below",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.json").write_text(f"of {name}")
    os.truncate(tmp_path / "empty/record.json", 0)
    os.truncate(tmp_path / "large/record.json", MOST_BYTES + 1)
    os.chown(tmp_path / "others/record.json", 1, 1)
    for name, mode in (("second name", 0o600), ("written by others", 0o620)):
        os.link(tmp_path / name / "record.json", tmp_path / f"link of {name}")
        os.chmod(tmp_path / name / "record.json", mode)
    for name in ("fifo", "link"):
        (tmp_path / name / "record.json").unlink()
    os.mkfifo(tmp_path / "fifo/record.json")
    (tmp_path / "link/record.json").symlink_to("../plain/record.json")
    (tmp_path / "none").mkdir()
    (tmp_path / "directory/record.json").mkdir(parents=True)
    (tmp_path / "linked").symlink_to("plain")
    record = tmp_path / "plain/record.json"
    with bind_mount(record, tmp_path / "mounted/record.json"), bind_mount(tmp_path / "plain", tmp_path / "below"):
        yield tmp_path


MOST_BYTES = 65536


def test_it_reads_the_records_that_python_reads(containers: Path) -> None:
    kernel = Kernel()

    def by_python(directory: Fd, name: str) -> bytes | None:
        try:
            with kernel.open_dir(directory, os.fsencode(name)) as fd, open_record(kernel, fd, 0) as record_fd:
                return kernel.read(record_fd, MOST_BYTES + 1)
        except (OSError, BadRecord):
            return None

    names = [*os.listdir(containers), "gone"]
    with opened(containers) as directory:
        read = read_small_files(kernel, directory, names, RECORD, 0, MOST_BYTES)
        assert dict(zip(names, read, strict=True)) == {name: by_python(directory, name) for name in names}
    assert {name for name, text in zip(names, read, strict=True) if text is not None} == {
        "plain",
        "empty",
        "second name",
    }


def test_it_says_which_directories_may_lack_something(containers: Path) -> None:
    kernel = Kernel()

    def is_there(directory: Fd, name: str) -> bool:
        try:
            kernel.stat(directory, os.fsencode(name) + b"/" + RECORD)
        except OSError:
            return False
        return True

    names = [*os.listdir(containers), "gone"]
    with opened(containers) as directory:
        lacking = names_that_may_lack(kernel, directory, names, RECORD)
        assert lacking == [name for name in names if not is_there(directory, name)]
    assert {"none", "gone", "linked", "mounted"} < {*lacking}


def test_records_are_read_one_by_one_where_each_call_is_to_be_seen(containers: Path) -> None:
    watched = Kernel(lambda _call: None)
    with opened(containers) as directory:
        assert read_small_files(watched, directory, ["plain"], RECORD, 0, MOST_BYTES) == [None]
        assert names_that_may_lack(watched, directory, ["plain"], RECORD) == ["plain"]


@pytest.mark.parametrize("name", ["../file", "a/b", "nul\0", "/"])
def test_only_names_are_taken(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "d").mkdir()
    with opened(tmp_path / "d") as fd, pytest.raises(ValueError, match="name"):
        unlink_all(Kernel(), fd, [name])
    assert (tmp_path / "file").exists()
