"""What a command does before it looks at orphans: settle what killed ones left."""

from __future__ import annotations

from collections.abc import Sequence

from fusefs.cli import output
from fusefs.linux.kernel import Kernel
from fusefs.store.find import tend_all


def tended(volumes: Sequence[bytes], kernel: Kernel | None = None) -> Kernel:
    """Recover, adopt drops and stock reserves as the caller may, and warn of what could not be settled."""
    kernel = kernel or Kernel()
    for problem in tend_all(kernel, volumes):
        output.warn(problem)
    return kernel
