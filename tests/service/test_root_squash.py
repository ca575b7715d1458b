"""Root squash: root is nobody to the server, `init`, `doctor` and `status` say it, and the ways around it work."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.service_status import VolumePhase
from fusefs.store.root_squash import SQUASHED
from tests.support.fuse_squash import squashed, squashing_volume
from tests.support.make_trees import IMMUTABLE, Dir, make_tree, set_flags
from tests.support.other_users import as_user, run_as
from tests.support.real_filesystems import loop_volume
from tests.support.service_process import QUICK, service
from tests.support.small_orphans import EXPIRED
from tests.support.store_verbs import init, swap
from tests.support.trashd_command import TRASHD, done_well, environment, trashd

pytestmark = pytest.mark.needs("root")

ALICE = 12101


@contextmanager
def immutable(directory: Path) -> Iterator[None]:
    set_flags(directory, IMMUTABLE)
    try:
        yield
    finally:
        set_flags(directory, IMMUTABLE, on=False)


@pytest.fixture
def nodes() -> Iterator[tuple[Path, Path]]:
    """A node that the server trusts, on which root made a store, and one whose root it squashes."""
    with squashing_volume(0) as served, squashed(served.backing, served.path.parent / "there") as there:
        init(served.path)
        make_tree(served.path / "home", Dir(owner=(ALICE, ALICE)))
        yield served.path, there


def orphan_on(node: Path) -> Path:
    """Where an expired orphan of Alice's is, of what she made and swapped on that node."""

    def made() -> Path:
        victim = make_tree(node / "home/job", Dir({"a": "1", "private": Dir({"b": "2"}, mode=0o700)}))
        done = swap(victim, None, EXPIRED)
        return Path(os.fsdecode(done.store)) / "orphans" / done.id

    return as_user(ALICE, made)


def test_init_says_that_root_is_squashed() -> None:
    with squashing_volume() as served:
        done = trashd("init", served.path)
        assert (done.code, SQUASHED in done.err.replace("Root", "root")) == (4, True)
        assert "users run trashd reap or their own service" in done.err
        assert not os.listdir(served.path)


def test_init_says_it_where_root_may_make_nothing_at_all() -> None:
    with squashing_volume() as served:
        served.backing.chmod(0o755)
        assert "root squash" in trashd("init", served.path).err


def test_init_of_a_store_that_a_trusted_node_made_says_it(nodes: tuple[Path, Path]) -> None:
    _trusted, there = nodes
    for words in (("init", there), ("init", "--known", there)):
        done = trashd(*words)
        assert (done.code, "root squash" in done.err) == (4, True)


def test_another_refusal_is_no_squash() -> None:
    with loop_volume("ext4", 4) as volume, immutable(volume):
        done = trashd("init", volume)
    assert (done.code, "root squash" in done.err) == (4, False)


def test_doctor_says_it_and_nothing_that_only_comes_of_it(nodes: tuple[Path, Path]) -> None:
    trusted, there = nodes
    orphan_on(trusted)
    for words in ((), ("--repair",)):
        done = trashd("doctor", "--json", *words, there)
        (told,) = done.objects()
        assert (done.code, told["where"], told["what"]) == (1, str(there), SQUASHED)
    assert not any(one["what"] == SQUASHED for one in trashd("doctor", "--json", trusted).objects())


def test_status_says_it(base: Path, nodes: tuple[Path, Path]) -> None:
    _trusted, there = nodes
    with service(base, there) as running:
        found = running.until_phase(there, VolumePhase.GONE)
        assert "root squash" in found.why
        assert "root squash" in trashd("status").out


# The ways that work.


def test_a_service_on_a_trusted_node_reaps_what_was_swapped_on_another(base: Path, nodes: tuple[Path, Path]) -> None:
    trusted, there = nodes
    done_well("init", "--known", trusted)
    orphan = trusted / orphan_on(there).relative_to(there)
    with service(base, trusted) as running:
        running.until(lambda: not orphan.exists())


def test_a_users_own_service_reaps_beside_roots_that_may_not(base: Path, nodes: tuple[Path, Path]) -> None:
    _trusted, there = nodes
    own = base / "alice"
    own.mkdir()
    os.chown(own, ALICE, ALICE)
    with service(base, there) as roots:
        roots.until_phase(there, VolumePhase.GONE)
        orphan = orphan_on(there)
        with service(own, there, user=ALICE, config=QUICK, environment={"HOME": str(own)}) as running:
            running.until(lambda: not _is_there(orphan))


def test_a_schedulers_epilog_reaps_as_its_user(nodes: tuple[Path, Path]) -> None:
    _trusted, there = nodes
    orphan = orphan_on(there)
    env = environment({"HOME": "/nonexistent"})
    done = run_as(ALICE, [TRASHD, "reap", "--volume", str(there)], env=env)
    assert (done.returncode, _is_there(orphan)) == (0, False), done


def _is_there(orphan: Path) -> bool:
    """As Alice sees it: root may not look into her folder."""
    return as_user(ALICE, partial(os.path.lexists, orphan))
