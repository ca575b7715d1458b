"""What a user writes into a registry, or puts where it leads, costs others nothing and gets nothing of theirs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from fusefs.core.service_status import VolumePhase
from fusefs.store.registry_lines import RegistryLine
from tests.support.fuse_silent import silent_fuse
from tests.support.make_trees import Dir, make_tree
from tests.support.service_process import QUICK, service
from tests.support.store_verbs import users_own
from tests.support.trashd_command import trashd
from tests.support.user_homes import (
    ALICE,
    BOB,
    SOON,
    bare_stores,
    line_of,
    outlasts,
    own_stores,
    phases,
    register,
    registry_of,
    thrown,
)

pytestmark = [pytest.mark.needs("root"), pytest.mark.usefixtures("home")]

OFTEN = f'poll = "1s"\n{QUICK}'
MOST_FDS = 150
"""Of the service: two stores of a user's are open at a time."""


def test_nobody_has_anothers_store_reaped_by_registering_it(base: Path, home: Mapping[int, Path]) -> None:
    kept = thrown(ALICE, home[ALICE], *SOON)
    registry_of(home[ALICE]).unlink()
    register(BOB, home[BOB], [line_of(home[ALICE])])
    with service(base, config=OFTEN) as running:
        outlasts(running, BOB, home[BOB], kept)
        # It is told of a breath after it is served.
        running.until(lambda: {one.owner for one in own_stores(running)} == {BOB})
        assert kept.exists()


@pytest.mark.parametrize(
    "lines",
    [lambda home: [line_of(home[ALICE])], lambda home: bare_stores(BOB, home[BOB], 1) * 10_000, None],
    ids=["of hers", "ten thousand", "a fifo"],
)
def test_a_registry_of_anothers_keeps_nobody_from_being_served(
    base: Path, home: Mapping[int, Path], lines: Callable[[Mapping[int, Path]], list[RegistryLine]] | None
) -> None:
    container = thrown(ALICE, home[ALICE], *SOON)
    register(BOB, home[BOB], lines(home) if lines else [])
    if lines is None:
        registry_of(home[BOB]).unlink()
        os.mkfifo(registry_of(home[BOB]))
        os.chown(registry_of(home[BOB]), BOB, BOB)
    with service(base) as running:
        running.until(lambda: not container.exists())
        running.until(lambda: {one.owner for one in own_stores(running)} == {ALICE})


def test_another_store_at_a_registered_place_is_not_served(base: Path, home: Mapping[int, Path]) -> None:
    kept = thrown(ALICE, home[ALICE], *SOON)
    line = line_of(home[ALICE])
    other = line._replace(identity=line.identity._replace(handle="1:" + "ab" * 12, ino=line.identity.ino + 1))
    register(ALICE, home[ALICE], [other])
    with service(base, config=OFTEN) as running:
        outlasts(running, BOB, home[BOB], kept)


def test_a_user_with_many_stores_has_so_many_served_and_others_all_of_theirs(
    base: Path, home: Mapping[int, Path]
) -> None:
    register(BOB, home[BOB], bare_stores(BOB, home[BOB], 300))
    container = thrown(ALICE, home[ALICE], *SOON)
    with service(base) as running:
        running.until(lambda: not container.exists())
        assert len(os.listdir(f"/proc/{running.process.pid}/fd")) < MOST_FDS
        running.until(lambda: [one.owner for one in own_stores(running)].count(BOB) == 100)
        done = trashd("status")
        assert done.code == 0
        assert f"not served: uid {BOB}: 200 of the stores in his registry" in done.out


@pytest.mark.needs("fuse")
@pytest.mark.parametrize(("n_stores", "uid"), [(5, 0), (1, BOB)], ids=["a disk", "a user's own mount"])
def test_what_hangs_holds_up_whose_stores_are_on_it_alone(
    base: Path, home: Mapping[int, Path], n_stores: int, uid: int
) -> None:
    register(BOB, home[BOB], bare_stores(BOB, home[BOB], n_stores))
    thrown(ALICE, home[ALICE])
    with service(base) as running:
        running.until(lambda: phases(running) == [VolumePhase.IDLE] * (n_stores + 1))
        with ExitStack() as hanging:
            for number in range(n_stores):
                hanging.enter_context(silent_fuse(home[BOB] / f"bare-{number}", uid))
            running.reload()
            container = thrown(ALICE, home[ALICE], *SOON)
            running.until(lambda: not container.exists())
            running.stop()


def test_a_store_that_its_owner_breaks_alarms_nobody_and_is_served_when_it_is_whole(
    base: Path, home: Mapping[int, Path]
) -> None:
    kept = thrown(BOB, home[BOB])
    volume = users_own(home[BOB], BOB) / "volume.json"
    text = volume.read_text()
    with service(base, config=OFTEN) as running:
        running.until(lambda: phases(running) == [VolumePhase.IDLE])
        volume.write_text(text.replace(volume_id(text), "0" * 32))
        thrown(ALICE, home[ALICE])
        running.reload()
        running.until(lambda: VolumePhase.BROKEN in phases(running))
        assert trashd("status").code == 0
        assert kept.exists()
        volume.write_text(text)
        running.reload()
        running.until(lambda: phases(running) == [VolumePhase.IDLE] * 2)


def volume_id(text: str) -> str:
    return next(word for word in text.split('"') if len(word) == 32)


def test_a_folder_that_is_a_link_or_open_to_others_is_not_served(base: Path, home: Mapping[int, Path]) -> None:
    kept = thrown(BOB, home[BOB], *SOON)
    folder = kept.parents[1]
    folder.chmod(0o755)
    with service(base, config=OFTEN) as running:
        outlasts(running, ALICE, home[ALICE], kept)
        running.until(lambda: any(one.refused for one in own_stores(running) if one.owner == BOB))
        aside = make_tree(home[BOB] / "aside", Dir(owner=(BOB, BOB)))
        folder.chmod(0o700)
        folder.rename(aside / "u")
        folder.symlink_to(aside / "u")
        running.reload()
        outlasts(running, ALICE, home[ALICE], aside / "u/orphans" / kept.name)


def test_a_store_in_which_others_make_names_is_told_and_not_reaped_of(base: Path, home: Mapping[int, Path]) -> None:
    kept = thrown(BOB, home[BOB], *SOON)
    kept.parents[2].chmod(0o1777)
    with service(base, config=OFTEN) as running:
        running.until(lambda: any(one.why for one in own_stores(running) if one.owner == BOB))
        outlasts(running, ALICE, home[ALICE], kept)
        assert "The trash store there belongs to somebody else" in trashd("status").out
