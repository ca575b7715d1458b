"""The option of commands that the ranks of an MPI job share."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import click


def mpi_option(shares: Callable[[Any], Any]) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """A command that gets `job`: what has the ranks of its MPI job share the work, as the first; None without --mpi.

    The other ranks do what the first sends them, and say nothing.

    shares  makes it of the job (engine.mpi_ranks.MpiJob)
    """

    def decorated(act: Callable[..., int]) -> Callable[..., int]:
        @click.option(
            "--mpi", is_flag=True, help="Be a rank of an MPI job (mpiexec -n N trashd …), all of which share it."
        )
        @wraps(act)
        def command(*args: Any, mpi: bool, **options: Any) -> int:
            if not mpi:
                return act(*args, **options, job=None)
            from fusefs.core.errors import Refused
            from fusefs.engine.mpi_ranks import joined
            from fusefs.linux.kernel import Kernel

            with joined() as job:
                uids = job.uids()
                if not job.is_first:
                    # Root's takes no word from anybody: the first, which may be a user's, says why.
                    return job.serve(Kernel()) if os.geteuid() else 0
                as_whom = "start them as the user whose files they are"
                if 0 in uids:
                    raise Refused(f"rank {uids.index(0)} runs as root", as_whom)
                if len({*uids}) > 1:
                    raise Refused("the ranks run as different users", as_whom)
                return act(*args, **options, job=shares(job))

        return command

    return decorated
