"""One sweep that the ranks of an MPI job share: what goes, and what stays, is as without them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.mpi.conftest import MPICH
from tests.support.make_trees import Spec, make_tree, weird_names
from tests.support.many_files import fill
from tests.support.mpi_jobs import RankMounts, give_to_user, run_ranks
from tests.support.run_sweep import names
from tests.support.trashd_command import done_well

N_RANKS = 3
WAYS = (
    ("--name", "*.log", "--delete"),
    ("--name", "build", "--type", "d", "--delete", "--recursive"),
    ("--empty", "--delete"),
    ("--size", "+1K", "--delete"),
)


def tree_at(top: Path) -> Path:
    many: Spec = {
        f"d{n}": {"a.log": "x" * 2000, "b": "", "build": {"c": {"d": "x"}, "e": ""}, "none": {}} for n in range(60)
    }
    make_tree(top, {"many": many, "odd": {name: {name + b".log"[: 255 - len(name)]: ""} for name in weird_names()}})
    fill(top / "flat.log", 3000)
    give_to_user(top)
    return top


@pytest.mark.parametrize("way", WAYS)
def test_what_goes_is_what_one_machine_would_take(volume: Path, mpi: str, way: tuple[str, ...]) -> None:
    twin, top = tree_at(volume / "twin"), tree_at(volume / "top")
    (alone,) = done_well("sweep", twin, *way, "--json").objects()
    done = run_ranks(mpi, N_RANKS, "sweep", "--mpi", top, *way, "--json")
    assert done.code == 0, done
    (told,) = done.objects()
    assert told["sums"] == alone["sums"]
    assert names(top) == names(twin)


@pytest.mark.needs("root", "fuse", "mpich")
def test_machines_share_a_large_flat_directory(nodes: RankMounts) -> None:
    top = fill(nodes.path / "top", 2500)
    give_to_user(top)
    nodes.slow(1000)
    done = nodes.run(2, "sweep", "--mpi", top, "--name", "f*", "--delete")
    assert (done.code, done.err) == (0, ""), done
    assert os.listdir(top) == []
    assert min(nodes.shares("unlink")) > 0.2


@pytest.mark.needs("root", "fuse", "mpich")
def test_another_directory_at_its_path_on_a_machine_ends_the_job_before_anything_is_gone(nodes: RankMounts) -> None:
    other = nodes.path / "other"
    other.mkdir()
    for top in (nodes.path / "top", other / "top"):
        give_to_user(fill(top, 10))
    mounts = [nodes.path, other]
    done = run_ranks(
        "mpich", 2, "sweep", "--mpi", nodes.path / "top", "--name", "f*", "--delete", nodes=mounts, at=nodes.path
    )
    assert done.code == 3
    assert ": Refused: the first rank has another /" in done.err
    assert [len(os.listdir(top)) for top in (nodes.path / "top", other / "top")] == [10, 10]


@pytest.mark.parametrize("mpi", [MPICH])
@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "--mpi without --delete"),
        (("--print",), "--mpi without --delete"),
        (("--move-to", "x"), "--mpi without --delete"),
        (("--delete", "--paced"), "--mpi with --paced"),
        (("--delete", "--max-delete", "1"), "--mpi with --max-delete"),
    ],
)
def test_it_deletes_and_does_nothing_else(volume: Path, mpi: str, words: tuple[str, ...], told: str) -> None:
    top = fill(volume / "top", 3)
    done = run_ranks(mpi, 2, "sweep", "--mpi", top, "--name", "f*", *words)
    assert (done.code, told in done.err, "  hint: " in done.err) == (2, True, True), done
    assert len(os.listdir(top)) == 3
