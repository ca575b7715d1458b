"""One orphan, or one sweep, that the ranks of an MPI job share: by one machine's laws, ranks lost or not."""

import json
import os
import pwd
import shlex
import subprocess
import time
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from fusefs.core.pacing import CUT_BYTES
from tests.mpi.conftest import EACH_MPI, MPICH
from tests.support.make_trees import Spec, Symlink, bulky_tree, fill, make_chain, make_tree, weird_names
from tests.support.mpi_jobs import (
    PYTHON,
    ROOT,
    USER,
    RankMounts,
    folder_of_user,
    give_to_user,
    is_gone,
    orphan_of_user,
    run_ranks,
    start_ranks,
    state_of_user,
    swap_by_user,
)
from tests.support.other_users import as_user
from tests.support.outside_tree import Canary
from tests.support.real_filesystems import tmpfs_volume
from tests.support.run_sweep import names
from tests.support.slurm_cluster import slurm_cluster
from tests.support.store_verbs import assert_silent, init, swap
from tests.support.trashd_command import TRASHD, done_well, environment, swapped, trashd

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
from fusefs.engine.mpi_ranks import SentSlice, join_job
from tests.support.mpi_jobs import open_mistaken
with join_job() as job:
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
    assert done.err.count("trashd: rank 0 runs as root\n") == 1
    assert "  hint: start all ranks as the user who owns the files" in done.err
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
    assert (done.code, "trashd: rank 1 runs as root\n" in done.err) == (3, True), done
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
    assert done.err.startswith("trashd: --mpi needs mpi4py, which can't be loaded (there is none)\n  hint: run pip ")


@pytest.mark.needs("root", "mpich")
def test_ranks_that_know_of_no_other_are_told_apart_from_a_job_of_one(volume: Path) -> None:
    words = ("-m", "fusefs.cli.main", "reap", "--mpi", "--volume", volume)
    for size, code in (("1", 0), ("4", 3)):
        variables = environment({"OMPI_COMM_WORLD_SIZE": size})
        done = subprocess.run([PYTHON, *words], env=variables, user=USER, group=USER, capture_output=True, check=False)
        assert done.returncode == code, done
    assert b"trashd: 4 ranks were started, but mpi4py's MPI sees only one\n" in done.stderr


@pytest.mark.parametrize("mpi", [MPICH])
@pytest.mark.parametrize(("option", "told"), [("--paced", "--mpi can't be combined with --paced")])
def test_what_is_of_one_machine_does_not_go_with_it(volume: Path, mpi: str, option: str, told: str) -> None:
    done = run_ranks(mpi, 2, "reap", "--mpi", option, "--volume", volume)
    assert (done.code, told in done.err) == (2, True)


N_KILLS = int(os.environ.get("TRASHD_TEST_KILLS", "8")) // 2
"""By each MPI; `make soak-mpi` asks for a hundred in all."""
_GLANCE_S = 0.01
_JOB_S = 0.8
"""How long the ranks are at it, about, once they have begun."""


def lose_a_rank(volume: Path, mpi: str, identifier: str, random: Random) -> bool:
    """Begin a job and kill one of its ranks; whether that came before its end."""
    ranks = start_ranks(mpi, N_RANKS, "reap", "--mpi", "--now", "--volume", volume, identifier)
    reaping = folder_of_user(volume) / "reaping"
    while not os.listdir(reaping) and ranks.process.poll() is None:
        time.sleep(_GLANCE_S)
    time.sleep(random.random() * _JOB_S)
    pids = ranks.pids()
    is_hit = bool(pids) and ranks.process.poll() is None
    if is_hit:
        ranks.lose(random.choice(pids))
    code = ranks.wait().code
    assert not ranks.pids()
    return is_hit and code != 0


@pytest.mark.timeout(100 + 20 * N_KILLS)
@pytest.mark.parametrize("mpi", EACH_MPI)
def test_a_reap_that_lost_ranks_at_any_time_is_finished_by_the_next_and_nothing_outside_is_touched(
    volume: Path, mpi: str
) -> None:
    random, canary = Random(f"ranks of {mpi}"), Canary(volume)
    n_hits = n_jobs = 0
    while n_hits < N_KILLS:
        tree = bulky_tree(volume / f"job{n_jobs}", 30, 300, 30_000)
        (tree / "out").symlink_to(canary.path)
        give_to_user(tree)
        canary.link_into(tree)
        identifier = swap_by_user(tree)
        while not is_gone(volume, identifier) and n_hits < N_KILLS:
            n_jobs += 1
            n_hits += lose_a_rank(volume, mpi, identifier, random)
            canary.assert_untouched()
            if not is_gone(volume, identifier):
                assert state_of_user(volume, identifier) in ("orphans", "reaping")
        if not is_gone(volume, identifier):
            done = run_ranks(mpi, N_RANKS, "reap", "--mpi", "--now", "--volume", volume, identifier)
            assert done.code == 0, done
        assert is_gone(volume, identifier)
        canary.assert_alone()
    print(f"{mpi}: {n_hits} ranks lost in {n_jobs} jobs")


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
    assert ": not the same directory as on the first rank" in done.err
    assert [len(os.listdir(top)) for top in (nodes.path / "top", other / "top")] == [10, 10]


@pytest.mark.parametrize("mpi", [MPICH])
@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "--mpi needs --delete"),
        (("--print",), "--mpi needs --delete"),
        (("--move-to", "x"), "--mpi needs --delete"),
        (("--delete", "--paced"), "--mpi can't be combined with --paced"),
        (("--delete", "--max-delete", "1"), "--mpi can't be combined with --max-delete"),
    ],
)
def test_it_deletes_and_does_nothing_else(volume: Path, mpi: str, words: tuple[str, ...], told: str) -> None:
    top = fill(volume / "top", 3)
    done = run_ranks(mpi, 2, "sweep", "--mpi", top, "--name", "f*", *words)
    assert (done.code, told in done.err) == (2, True), done
    assert len(os.listdir(top)) == 3


N_TASKS, N_ORPHANS = 8, 20


@pytest.mark.needs("root", "slurm")
def test_an_array_of_tasks_reaps_every_orphan_exactly_once(tmp_path: Path) -> None:
    with tmpfs_volume("64m") as volume, slurm_cluster() as variables:
        init(volume)
        orphans = [swapped(fill(volume / f"job{n}", 200), "--keep-for", "0s")["id"] for n in range(N_ORPHANS)]
        reap = shlex.join([TRASHD, "reap", "--one", "--json", "--volume", str(volume)])
        script = tmp_path / "task"
        script.write_text(f'#!/bin/sh\nwhile told=$({reap}) && [ "$told" ]; do echo "$told"; done\n')
        array = ["sbatch", "--wait", f"--array=1-{N_TASKS}", f"--output={tmp_path}/%a.out", str(script)]
        subprocess.run(array, env=environment(variables), check=True, capture_output=True, timeout=90)
        told = [json.loads(line) for out in tmp_path.glob("*.out") for line in out.read_text().splitlines()]
        assert Counter(one["id"] for one in told) == dict.fromkeys(orphans, 1)
        assert os.listdir(volume / ".trashd/u/0/orphans") == []
        assert_silent(volume)


@pytest.mark.needs("root", "slurm")
@pytest.mark.needs("mpich")
def test_srun_starts_ranks_that_share_a_tree() -> None:
    """As a user whom the system knows: Slurm starts nothing for others."""
    user = pwd.getpwnam("games")
    with tmpfs_volume("64m") as volume, slurm_cluster() as variables:
        os.chown(volume, user.pw_uid, user.pw_gid)

        def orphan() -> str:
            init(volume)
            return str(swap(bulky_tree(volume / "job", 6, 100, 2000)).id)

        identifier = as_user(user.pw_uid, orphan, gid=user.pw_gid)
        words = ("reap", "--mpi", "--now", "--json", "--volume", str(volume), identifier)
        variables |= {"PYTHONPATH": str(ROOT), "HOME": "/", "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            ["srun", "--mpi=pmi2", "--ntasks=4", str(PYTHON), "-m", "fusefs.cli.main", *words],
            env=environment(variables),
            cwd="/",
            user=user.pw_uid,
            group=user.pw_gid,
            extra_groups=[],
            capture_output=True,
            check=False,
            timeout=90,
        )
        assert done.returncode == 0, done
        assert json.loads(done.stdout)["report"]["n_failed"] == 0
        as_user(user.pw_uid, lambda: assert_silent(volume), gid=user.pw_gid)


N_NODES = 2
DELAY_US = 2_000


@pytest.mark.needs("root", "fuse", "mpich")
def test_machines_share_a_large_flat_orphan(nodes: RankMounts) -> None:
    identifier = orphan_of_user(fill(nodes.path / "job", 1500))
    nodes.slow(DELAY_US)
    done = nodes.run(N_NODES, "reap", "--mpi", "--now", "--volume", nodes.path, identifier)
    assert (done.code, done.err) == (0, ""), done
    assert is_gone(nodes.path, identifier)
    assert min(nodes.shares("unlink")) > 0.25


@pytest.mark.needs("root", "fuse", "mpich")
def test_machines_share_a_tree_of_every_shape(nodes: RankMounts) -> None:
    identifier = orphan_of_user(bulky_tree(nodes.path / "job", 8, 30, 300))
    nodes.slow(DELAY_US // 2)
    done = nodes.run(3, "reap", "--mpi", "--now", "--volume", nodes.path, identifier)
    assert (done.code, done.err) == (0, ""), done
    assert is_gone(nodes.path, identifier)
    assert min(nodes.shares("unlink")) > 0.2


@pytest.mark.needs("root", "fuse", "mpich")
def test_a_machine_that_has_not_the_volume_ends_the_job_before_anything_is_gone(
    nodes: RankMounts, tmp_path: Path
) -> None:
    identifier = orphan_of_user(fill(nodes.path / "job", 10))
    bare = tmp_path / "bare"
    bare.mkdir()
    mounts = [nodes.path, bare]
    words = ("reap", "--mpi", "--now", "--volume", nodes.path, identifier)
    done = run_ranks("mpich", 2, *words, nodes=mounts, at=nodes.path)
    assert done.code == 3
    assert "trashd: rank 1: " in done.err
    assert "  hint: on all machines that run a rank, the volume must be mounted at the same path" in done.err
    assert len(os.listdir(folder_of_user(nodes.path) / f"orphans/{identifier}/tree")) == 10
