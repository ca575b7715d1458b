"""What a command does before it looks at orphans: settle what killed ones left."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fusefs.cli import output
from fusefs.linux.kernel import Kernel
from fusefs.store.find_orphans import tend_all
from fusefs.store.take_over import Waits


def tended(
    volumes: Sequence[bytes], kernel: Kernel | None = None, ended: Collection[str] = (), waits: Waits | None = None
) -> Kernel:
    """Recover, adopt drops and stock reserves as the caller may, and warn of what could not be settled.

    ended, waits  as for `recover`
    """
    kernel = kernel or Kernel()
    for problem in tend_all(kernel, volumes, ended, waits):
        output.warn(problem)
    return kernel
