"""Children with our memory: what is theirs, what is ours, and that one which ends makes no further call."""

from __future__ import annotations

import os
import subprocess
import threading
from functools import partial
from pathlib import Path

import pytest

from fusefs.linux.kernel import Kernel
from tests.support.crash_scenarios import DyingAfter
from tests.support.shared_memory_children import ChildDied, call_in_child, code_of_child, end_process
from tests.support.store_verbs import DyingAt, in_child


def test_fds_directory_and_pid_are_the_childs_and_objects_are_ours(tmp_path: Path) -> None:
    seen: list[int] = []

    def act() -> int:
        os.chdir(tmp_path)
        seen.append(os.getpid())
        return os.open("file", os.O_RDWR | os.O_CREAT)

    here = Path.cwd()
    fd = call_in_child(act, "a test")
    assert here == Path.cwd()
    assert seen[0] != os.getpid()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_child_forks_starts_programs_and_has_children() -> None:
    def act() -> tuple[bytes, int, int]:
        output = subprocess.run(["echo", "word"], capture_output=True, check=True).stdout
        return output, in_child(lambda: end_process(5)), code_of_child(lambda: end_process(6))

    assert call_in_child(act, "a test") == (b"word\n", 5, 6)


def test_several_threads_have_children_at_once() -> None:
    results: list[int] = []

    def wait_for_program(number: int) -> int:
        subprocess.run(["true"], check=True)
        return number

    def act(number: int) -> None:
        results.extend(call_in_child(partial(wait_for_program, number), "a test") for _ in range(20))

    threads = [threading.Thread(target=act, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == sorted([*range(4)] * 20)


def test_an_error_that_cannot_be_copied_is_told_as_text() -> None:
    class LocalError(Exception):
        pass

    def act() -> None:
        raise LocalError("what went wrong")

    with pytest.raises(ChildDied, match="what went wrong"):
        call_in_child(act, "a test")


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
