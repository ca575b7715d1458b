"""Under a scheduler: an array of tasks shares a volume, and srun starts ranks."""

from __future__ import annotations

import json
import os
import pwd
import shlex
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.support.many_files import bulky_tree, fill
from tests.support.mpi_jobs import PYTHON, ROOT
from tests.support.other_users import as_user
from tests.support.real_filesystems import tmpfs_volume
from tests.support.slurm_cluster import slurm_cluster
from tests.support.store_verbs import assert_silent, init, swap
from tests.support.trashd_command import TRASHD, environment, swapped

pytestmark = pytest.mark.needs("root", "slurm")

N_TASKS, N_ORPHANS = 8, 20


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
