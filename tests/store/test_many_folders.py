"""What many folders, orphans and planted names cost: so many calls for each, and a swap always the same."""

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.names import make_id
from fusefs.core.results import Finding
from fusefs.linux.kernel import Kernel
from fusefs.linux.user_ids import read_subordinates
from fusefs.service.open_volume import open_volume
from fusefs.store import make_folder, user_folders
from fusefs.store.doctor import check_folder, check_store
from fusefs.store.find_stores import discover_stores
from fusefs.store.layout import FOLDERS
from fusefs.store.make_folder import inspect_new_folders
from fusefs.store.orphans import call_in_each_folder, list_all_containers, tidy_all_folders
from fusefs.store.user_folders import inspect_folders
from tests.support.covering_sets import is_soak
from tests.support.make_trees import Dir, make_tree
from tests.support.other_users import as_user
from tests.support.real_filesystems import tmpfs_volume
from tests.support.small_orphans import EXPIRED
from tests.support.store_verbs import (
    calls_of,
    folder_of,
    forge,
    init,
    numbered_calls,
    opened,
    raw,
    recover_all,
    remove,
    swap,
)
from tests.support.trashd_command import TRASHD, environment

pytestmark = pytest.mark.needs("root")


BOB, FIRST = 1002, 100_000
ALICE = FIRST + 1_000_000
"""One whose number is none of Bob's, and higher than all of them."""
N_LISTED = 30
"""Each costs `list` and `doctor` a process."""
N_SEEN, N_MANY = (30_000, 65_536) if is_soak() else (300, 700)
A_LOOK = 300
OPENS = ("open", "openat2", "getdents")


@pytest.fixture
def roomy_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A store of root's with room for very many folders, on a system that tells of Bob's uids."""
    (tmp_path / "subuid").write_text(f"{BOB}:{FIRST}:65536\n")
    told = partial(read_subordinates, bytes(tmp_path / "subuid"))
    monkeypatch.setattr(make_folder, "read_subordinates", told)
    with tmpfs_volume("2g", ("nr_inodes=0",)) as path:
        init(path)
        yield path


def make_folders(roomy_system: Path, start: int, n: int) -> None:
    """What a user with all these subordinate uids would have made, as far as it can be seen."""
    for uid in range(FIRST + start, FIRST + start + n):
        folder = roomy_system / ".trashd/new" / str(uid)
        for part in (folder, *(folder / os.fsdecode(name) for name in FOLDERS)):
            part.mkdir(0o700)
            os.chown(part, uid, uid)


def doctor(kernel: Kernel, volumes: Sequence[bytes]) -> object:
    with opened(Path(os.fsdecode(volumes[0]))) as store:
        found = list(check_store(store._replace(kernel=kernel)))
    return [*found, *call_in_each_folder(discover_stores(kernel, volumes), check_folder, list[Finding])]


def serve(kernel: Kernel, volumes: Sequence[bytes]) -> object:
    """The service's look: which users there are to serve."""
    with open_volume(kernel, volumes[0]) as seen:
        return seen.users()


def calls(roomy_system: Path, look: Callable[[Kernel, list[bytes]], object]) -> Counter[str]:
    """How often each call is made, by root and its children."""
    return Counter(call.name for call in numbered_calls(lambda kernel: look(kernel, [raw(roomy_system)])))


@pytest.mark.parametrize(
    ("look", "n", "n_opens", "n_calls"),
    [
        pytest.param(list_all_containers, N_LISTED, 16, 40, id="list"),
        pytest.param(doctor, N_LISTED, 30, 80, id="doctor"),
        pytest.param(serve, N_SEEN, 3, 16, id="service"),
    ],
)
def test_each_folder_costs_a_look_so_many_calls(
    roomy_system: Path, look: Callable[[Kernel, list[bytes]], object], n: int, n_opens: int, n_calls: int
) -> None:
    make_registered(roomy_system, 0, n)
    some = calls(roomy_system, look)
    make_registered(roomy_system, n, n)
    more = calls(roomy_system, look) - some
    assert sum(more[name] for name in OPENS) <= n_opens * n
    assert sum(more.values()) <= n_calls * n
    assert sum(more.values()) <= sum(some.values()) + 20, "a folder costs more where there are more"


def make_registered(roomy_system: Path, start: int, n: int) -> int:
    """Such folders, and so many looks of root's that all are registered; how many."""
    make_folders(roomy_system, start, n)
    n_looks = 0
    while os.listdir(roomy_system / ".trashd/new"):
        look_with(Kernel(), roomy_system)
        n_looks += 1
    return n_looks


def look_with(kernel: Kernel, roomy_system: Path) -> None:
    with opened(roomy_system) as store:
        inspect_new_folders(store._replace(kernel=kernel))


def test_a_look_registers_so_many_and_each_persons_own_before_any_subordinates(roomy_system: Path) -> None:
    make_folders(roomy_system, 0, N_MANY)
    for uid in (ALICE, BOB):
        make_tree(roomy_system / f"home-{uid}", Dir({"job": Dir({"a": "1"}, owner=(uid, uid))}, owner=(uid, uid)))
        as_user(uid, lambda uid=uid: swap(roomy_system / f"home-{uid}/job").id)  # type: ignore[misc]
    counted = calls(roomy_system, lambda kernel, _volumes: look_with(kernel, roomy_system))
    assert counted["fsync"] <= 2 * A_LOOK
    served = os.listdir(roomy_system / ".trashd/u")
    assert {str(ALICE), str(BOB)} <= set(served)
    assert len(served) <= A_LOOK + 1
    look_with(Kernel(), roomy_system)
    assert len(os.listdir(roomy_system / ".trashd/u")) > len(served)


def test_all_of_them_are_served_in_the_end(roomy_system: Path) -> None:
    assert make_registered(roomy_system, 0, N_MANY) <= N_MANY // A_LOOK + 1
    with opened(roomy_system) as store:
        assert len(inspect_folders(store).inos) == N_MANY + 1


def test_one_users_subordinate_uids_are_served_up_to_a_number_and_others_all(
    roomy_system: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = partial(read_subordinates, bytes(tmp_path / "subuid"))
    monkeypatch.setattr("fusefs.linux.user_ids.read_subordinates", told)
    monkeypatch.setattr(user_folders, "MAX_SUBORDINATES", 10)
    make_folders(roomy_system, 0, 15)
    make_folders(roomy_system, ALICE - FIRST, 1)
    look_with(Kernel(), roomy_system)
    with opened(roomy_system) as store:
        census = inspect_folders(store)
    assert len(census.inos) == 10 + 2
    assert ALICE in census.inos
    [refused] = census.refused
    assert (refused.owner, refused.why[:2]) == (BOB, "5 ")
    assert len(os.listdir(roomy_system / ".trashd/new")) == 5


OWNER, OTHER = 1001, 1002
LOOK: dict[str, Callable[[Kernel, list[bytes]], object]] = {"list": list_all_containers, "tend": tidy_all_folders}


@pytest.fixture
def with_orphan() -> Iterator[Path]:
    """A store of root's with an orphan of Alice's, and room."""
    with tmpfs_volume("256m", ("nr_inodes=0",)) as path:
        init(path)
        make_tree(path / "alice", Dir({"job": Dir({"a": "1"}, owner=(OWNER, OWNER))}, owner=(OWNER, OWNER)))
        as_user(OWNER, lambda: swap(path / "alice/job", options=EXPIRED))
        yield path


def count_calls(with_orphan: Path, look: Callable[[Kernel, list[bytes]], object]) -> int:
    """How many calls a look makes, those of root's children included: each counts on from where it was forked."""
    return max(call.number for call in numbered_calls(lambda kernel: look(kernel, [raw(with_orphan)])))


def add_orphans(with_orphan: Path, n: int, start: int) -> None:
    """More orphans of Alice's like the one that is there."""
    orphans = folder_of(with_orphan, OWNER) / "orphans"
    first = next(orphans.iterdir())

    def act() -> None:
        for i in range(start, start + n):
            identifier = make_id("20250101T000000", i % 1000, b"job", i.to_bytes(6, "big"))
            shutil.copytree(first, orphans / identifier)
            forge(orphans / identifier / "record.json", id=identifier)

    as_user(OWNER, act)


@pytest.mark.parametrize("name", LOOK)
def test_each_orphan_costs_a_look_as_many_calls_as_the_one_before(with_orphan: Path, name: str) -> None:
    count_calls(with_orphan, LOOK[name])  # her folder is registered by the first one
    counts = []
    for n, start in ((0, 0), (150, 0), (150, 150)):
        add_orphans(with_orphan, n, start)
        counts.append(count_calls(with_orphan, LOOK[name]))
    none, some, twice = counts
    assert twice - some <= some - none + 20
    assert some - none <= 8 * 150


def plant(with_orphan: Path, n: int, start: int, names: Callable[[int], str]) -> None:
    """Names that may be users' folders, and are none."""
    area = next(path for path in (with_orphan / ".trashd/new", with_orphan / ".trashd/u") if path.exists())

    def act() -> None:
        for i in range(start, start + n):
            (area / names(i)).mkdir()

    as_user(OTHER, act)


OF_ONE: Callable[[int], str] = f"{OWNER}.{{:012x}}".format
OF_MANY: Callable[[int], str] = lambda i: str(20_000 + i)  # noqa: E731


@pytest.mark.parametrize("names", [OF_ONE, OF_MANY], ids=["one-user", "many-users"])
@pytest.mark.parametrize("name", LOOK)
def test_ten_thousand_planted_names_cost_no_process_and_a_few_calls_each(
    with_orphan: Path, name: str, names: Callable[[int], str]
) -> None:
    count_calls(with_orphan, LOOK[name])  # her folder is registered by the first one
    none = count_calls(with_orphan, LOOK[name])
    plant(with_orphan, 10_000, 0, names)
    entries_before = os.listdir(with_orphan / ".trashd")
    assert count_calls(with_orphan, LOOK[name]) - none <= 8 * 10_000
    assert os.listdir(with_orphan / ".trashd") == entries_before


N_FSYNCS = 2
"""Of the record before the exchange, of the container after the adoption (docs/internals/crash-windows.md)."""
MEMORY = frozenset({"brk", "mmap", "munmap", "mremap", "mprotect", "madvise"})
VERBS: dict[str, Callable[[Path, Kernel], object]] = {"swap": swap, "rm": remove}
PRIVATE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Root asks /proc for other mount namespaces: what else runs on the machine must not count."""


def flat(path: Path, n_files: int) -> Path:
    path.mkdir()
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    for number in range(n_files):
        os.mknod(b"%d" % number, 0o600, dir_fd=fd)
    os.close(fd)
    return path


@pytest.mark.parametrize("verb", VERBS)
def test_calls_are_the_same_in_an_empty_store_and_beside_a_hundred_orphans(volume: Path, verb: str) -> None:
    first, last = flat(volume / "first", 1), flat(volume / "last", 1)
    in_empty_store = calls_of(lambda kernel: VERBS[verb](first, kernel))
    for number in range(100):
        (volume / f".trashd/u/0/drop/{number}").touch()
    assert recover_all(volume) == []
    assert calls_of(lambda kernel: VERBS[verb](last, kernel)) == in_empty_store


@pytest.fixture(scope="module")
def _roomy() -> Iterator[Path]:
    with tmpfs_volume("256m", ("nr_inodes=0",)) as path:
        yield path


@pytest.fixture
def roomy(_roomy: Path) -> Path:
    """A tmpfs with a store that root knows, and with room for a hundred thousand inodes."""
    init(_roomy)
    return _roomy


def traced(verb: str, victim: Path, log: Path) -> Counter[str]:
    """The system calls of the real command, its interpreter's included, by name; but for those for memory.

    How many of these an allocator makes depends on where the kernel happens to put its first page.
    """
    strace = ("strace", "-f", "-qq", "--signal=none", "--output", str(log))
    variables = environment({"PYTHONHASHSEED": "0"})
    subprocess.run([*PRIVATE, *strace, TRASHD, verb, victim], env=variables, capture_output=True, check=True)
    calls = re.findall(r"^\d+ +(\w+)\(", log.read_text(errors="replace"), re.MULTILINE)
    return Counter(call for call in calls if call not in MEMORY)


@pytest.mark.needs("strace")
@pytest.mark.parametrize("verb", VERBS)
def test_real_command_makes_the_same_calls_for_ten_files_and_a_hundred_thousand(
    roomy: Path, tmp_path: Path, verb: str
) -> None:
    victims = [flat(roomy / f"{verb}{number}", n_files) for number, n_files in enumerate((0, 10, 100_000))]
    # The first run may have to compile what the others find compiled.
    _, few, many = [traced(verb, victim, tmp_path / victim.name) for victim in victims]
    assert few["renameat2"] + few["renameat"] + few["rename"] == 2  # the right process was looked at
    assert many == few


@pytest.mark.needs("strace")
@pytest.mark.parametrize("verb", VERBS)
def test_real_command_flushes_no_more_than_the_record_and_the_container(roomy: Path, tmp_path: Path, verb: str) -> None:
    calls = traced(verb, flat(roomy / f"flush-{verb}", 10), tmp_path / "log")
    flushes = {call: calls[call] for call in ("fsync", "fdatasync", "sync", "syncfs", "sync_file_range", "msync")}
    assert 0 < flushes["fsync"] <= N_FSYNCS
    assert sum(flushes.values()) == flushes["fsync"]
