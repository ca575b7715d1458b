"""One orphan that the ranks of an MPI job share, as one machine's workers would: by the same laws."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from fusefs.core.pacing import CUT_BYTES
from tests.mpi.conftest import MPICH
from tests.support.make_trees import Spec, Symlink, make_tree, weird_names
from tests.support.many_files import bulky_tree, fill
from tests.support.mpi_jobs import (
    PYTHON,
    USER,
    folder_of_user,
    give_to_user,
    is_gone,
    orphan_of_user,
    run_ranks,
    state_of_user,
    swap_by_user,
)
from tests.support.nested_directories import make_chain
from tests.support.outside_tree import Canary
from tests.support.trashd_command import environment, trashd

N_RANKS = 3
AS_USER = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", str(PYTHON))
ORDERS = """
import os, sys, time
from mpi4py import MPI
class Order:
    def __reduce__(self): return os.mkdir, (sys.argv[1],)
sent = MPI.COMM_WORLD.isend(Order(), 1)
for _ in range(300):
    sent.Test()
    time.sleep(0.01)
MPI.COMM_WORLD.Abort(7)
"""
"""A first rank that has the second make a directory: what a rank is sent says what it calls."""
MISTAKE = """
import time
from fusefs.core.pacing import SliceBudget
from fusefs.engine.mpi_ranks import SentSlice, joined
from tests.support.mpi_jobs import open_mistaken
with joined() as job:
    job.uids()
    job.prepare(open_mistaken)
    job.send(SentSlice(0, None, SliceBudget()), 1)
    while True:
        job.receive()
        time.sleep(0.01)
"""
"""A first rank that sends the second a slice in which a mistake is met, and waits for its end."""


def entries_in(tree: Path) -> int:
    return 1 + sum(len(names) + len(files) for _path, names, files in os.walk(tree))


def test_ranks_reap_a_tree_of_every_shape_and_touch_nothing_outside(volume: Path, mpi: str) -> None:
    canary = Canary(volume)
    tree = bulky_tree(volume / "job", 12, 300, 5000)
    (tree / "out").symlink_to(canary.path)
    give_to_user(tree)
    canary.link_into(tree)
    n = entries_in(tree)
    identifier = swap_by_user(tree)
    done = run_ranks(mpi, N_RANKS, "reap", "--mpi", "--now", "--json", "--volume", volume, identifier)
    assert done.code == 0, done
    (told,) = done.objects()
    assert (told["report"]["removed"], told["report"]["n_failed"]) == (n, 0)
    assert is_gone(volume, identifier)
    canary.assert_alone()


@pytest.mark.parametrize("mpi", [MPICH])
def test_names_of_every_kind_travel_as_bytes(volume: Path, mpi: str) -> None:
    names = weird_names()
    inner: Spec = {name: {name: "", b"\n\x1b[31m": {b"\xff" * 255: ""}} for name in names}
    tree = make_tree(
        volume / "job", {"deep": inner, "link": Symlink("deep"), **{f"d{n}": dict(inner) for n in range(40)}}
    )
    identifier = orphan_of_user(tree)
    done = run_ranks(mpi, N_RANKS, "reap", "--mpi", "--now", "--volume", volume, identifier)
    assert (done.code, done.err) == (0, ""), done
    assert is_gone(volume, identifier)


@pytest.mark.parametrize("mpi", [MPICH])
def test_what_is_too_deep_is_moved_up_and_goes(volume: Path, mpi: str) -> None:
    (volume / "job").mkdir()
    for n in range(4):
        make_chain(volume / f"job/chain{n}", 3000)
    identifier = orphan_of_user(volume / "job")
    done = run_ranks(mpi, N_RANKS, "reap", "--mpi", "--now", "--volume", volume, identifier)
    assert (done.code, done.err) == (0, ""), done
    assert is_gone(volume, identifier)


@pytest.mark.parametrize("mpi", [MPICH])
def test_a_large_file_that_is_cut_is_cut_to_its_end_by_its_rank(volume: Path, mpi: str) -> None:
    tree = make_tree(volume / "job", {f"d{n}": {"small": "x"} for n in range(30)})
    for n in range(4):
        with (tree / f"d{n}/large").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, CUT_BYTES + CUT_BYTES // 4)
    identifier = orphan_of_user(tree)
    words = ("reap", "--mpi", "--now", "--max-bytes", "100G/s", "--json", "--volume", volume, identifier)
    done = run_ranks(mpi, N_RANKS, *words)
    (told,) = done.objects()
    assert (done.code, told["report"]["n_failed"]) == (0, 0)
    assert told["report"]["n_bytes"] >= 5 * CUT_BYTES
    assert is_gone(volume, identifier)


@pytest.mark.parametrize("mpi", [MPICH])
def test_what_fails_is_told_and_in_quarantine(volume: Path, mpi: str) -> None:
    tree = fill(volume / "job", 10)
    fill(tree / "stuck", 3)
    identifier = orphan_of_user(tree)
    inside = folder_of_user(volume) / f"orphans/{identifier}/tree"
    os.chown(inside / "stuck", 0, 0)
    done = run_ranks(mpi, N_RANKS, "reap", "--mpi", "--now", "--json", "--volume", volume, identifier)
    (told,) = done.objects()
    assert (done.code, told["report"]["n_failed"]) == (13, 3)
    assert state_of_user(volume, identifier) == "quarantine"
    assert os.listdir(folder_of_user(volume) / f"quarantine/{identifier}/tree") == ["stuck"]


# Who may be a rank, and of what


def test_a_job_of_root_refuses_and_says_who_may(volume: Path, mpi: str) -> None:
    identifier = orphan_of_user(fill(volume / "job", 3))
    done = run_ranks(mpi, 2, "reap", "--mpi", "--now", "--volume", volume, identifier, uid=0)
    assert done.code == 3
    assert done.err.count("trashd: Refused: rank 0 runs as root\n") == 1
    assert "  hint: start them as the user whose files they are" in done.err
    assert state_of_user(volume, identifier) == "orphans"


@pytest.fixture
def nothing_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPICH lets ranks of several users into one job where they share no memory."""
    monkeypatch.setenv("MPIR_CVAR_NOLOCAL", "1")
    monkeypatch.setenv("UCX_TLS", "tcp,self")


@pytest.mark.usefixtures("nothing_shared")
@pytest.mark.parametrize("mpi", [MPICH])
def test_a_rank_of_root_among_others_refuses(volume: Path, mpi: str) -> None:
    identifier = orphan_of_user(fill(volume / "job", 3))
    words = ("reap", "--mpi", "--now", "--volume", volume, identifier)
    done = run_ranks(mpi, 1, *words, uid=0, first=[*AS_USER, "-m", "fusefs.cli.main", *words])
    assert (done.code, "trashd: Refused: rank 1 runs as root\n" in done.err) == (3, True), done
    assert state_of_user(volume, identifier) == "orphans"


@pytest.mark.usefixtures("nothing_shared")
@pytest.mark.parametrize("mpi", [MPICH])
def test_a_rank_of_root_takes_no_word_from_a_first_one_that_is_not(volume: Path, tmp_path: Path, mpi: str) -> None:
    first = [*AS_USER, "-c", ORDERS, str(tmp_path / "made")]
    done = run_ranks(mpi, 1, "reap", "--mpi", "--volume", volume, uid=0, first=first)
    assert done.code == 7, done
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("mpi", [MPICH])
def test_a_rank_in_which_a_mistake_is_met_ends_the_job(volume: Path, mpi: str) -> None:
    done = run_ranks(mpi, 1, "reap", "--mpi", "--volume", volume, first=[PYTHON, "-c", MISTAKE])
    assert done.code not in (0, None)
    assert "ZeroDivisionError" in done.err


def test_without_mpi4py_it_says_how_to_get_it(volume: Path) -> None:
    hidden = make_tree(volume / "hidden", {"mpi4py": {"__init__.py": "raise ImportError('there is none')"}})
    done = trashd("reap", "--mpi", "--volume", volume, PYTHONPATH=f"{hidden}:{os.environ.get('PYTHONPATH', '')}")
    assert done.code == 3
    assert done.err.startswith(
        "trashd: Refused: --mpi needs mpi4py, which can't be loaded (there is none)\n  hint: pip "
    )


@pytest.mark.needs("root", "mpich")
def test_ranks_that_know_of_no_other_are_told_apart_from_a_job_of_one(volume: Path) -> None:
    words = ("-m", "fusefs.cli.main", "reap", "--mpi", "--volume", volume)
    for size, code in (("1", 0), ("4", 3)):
        variables = environment({"OMPI_COMM_WORLD_SIZE": size})
        done = subprocess.run([PYTHON, *words], env=variables, user=USER, group=USER, capture_output=True, check=False)
        assert done.returncode == code, done
    assert b"trashd: Refused: 4 ranks were started, but mpi4py's MPI knows of one\n" in done.stderr


@pytest.mark.parametrize("mpi", [MPICH])
@pytest.mark.parametrize(("option", "told"), [("--paced", "--mpi with --paced")])
def test_what_is_of_one_machine_does_not_go_with_it(volume: Path, mpi: str, option: str, told: str) -> None:
    done = run_ranks(mpi, 2, "reap", "--mpi", option, "--volume", volume)
    assert (done.code, told in done.err) == (2, True)
