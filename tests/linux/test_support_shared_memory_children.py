"""A child with our memory that ends makes no further call: what a crash test sees is what a crash leaves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fusefs.linux.kernel import Kernel
from tests.support.crash_scenarios import DyingAfter
from tests.support.shared_memory_children import code_of_child
from tests.support.store_verbs import DyingAt


@pytest.mark.parametrize("hook", [DyingAt(1), DyingAfter("mkdir")], ids=["before a call", "after a call"])
def test_a_child_that_ends_makes_no_further_call_whatever_it_would_tidy_up(
    tmp_path: Path, hook: DyingAt | DyingAfter
) -> None:
    kernel = Kernel(hook)

    def act() -> None:
        fd = os.open(tmp_path, os.O_RDONLY)
        try:
            kernel.mkdir(fd, b"first")
            kernel.mkdir(fd, b"second")
        finally:
            try:
                kernel.rmdir(fd, b"first")
            finally:
                kernel.mkdir(fd, b"third")

    assert code_of_child(act) == DyingAt.EXIT_CODE
    assert os.listdir(tmp_path) == ["first"]
