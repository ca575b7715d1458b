"""The option of commands that the ranks of an MPI job share."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import click


def mpi_option(act: Callable[..., int]) -> Callable[..., int]:
    """A command that gets `job`: the MPI job of which this process is the first rank; None without --mpi.

    The other ranks do what the first sends them, and say nothing.
    """

    @click.option("--mpi", is_flag=True, help="Be a rank of an MPI job (mpiexec -n N trashd …), all of which share it.")
    @wraps(act)
    def command(*args: Any, mpi: bool, **options: Any) -> int:
        if not mpi:
            return act(*args, **options, job=None)
        from fusefs.core.errors import Refused
        from fusefs.engine.mpi_ranks import joined
        from fusefs.linux.kernel import Kernel

        with joined() as job:
            ranks = job.identities()
            if not job.is_first:
                return job.serve(Kernel())
            roots = [rank.host for rank in ranks if rank.uid == 0]
            if roots:
                raise Refused(f"a rank runs as root, on {roots[0]}", "start them as the user whose files they are")
            if len({rank.uid for rank in ranks}) > 1:
                raise Refused("the ranks run as different users", "start them as the user whose files they are")
            return act(*args, **options, job=job)

    return command
