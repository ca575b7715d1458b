"""Whether a thread gets on is told from outside: it waits, it works, or it only waits for Python's lock."""

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from queue import SimpleQueue

from fusefs.linux.thread_progress import ThreadProgress
from tests.support.foreground_mount import until


def in_thread(stack: ExitStack, act: Callable[[], object]) -> ThreadProgress:
    """A thread that does something after it has noted that it begins."""
    made: SimpleQueue[ThreadProgress] = SimpleQueue()

    def run() -> None:
        progress = ThreadProgress()
        progress.begin_period()
        made.put(progress)
        act()

    thread = threading.Thread(target=run)
    thread.start()
    stack.callback(thread.join)
    return made.get()


def test_who_waits_in_the_kernel_is_held_up() -> None:
    with ExitStack() as stack:
        read, write = os.pipe()
        for fd in (read, write):
            stack.callback(os.close, fd)
        progress = in_thread(stack, lambda: os.read(read, 1))
        stack.callback(os.write, write, b".")
        assert until(progress.is_held_up)


def test_who_waits_for_a_lock_of_python_is_not() -> None:
    goes_on = threading.Event()
    with ExitStack() as stack:
        progress = in_thread(stack, goes_on.wait)
        stack.callback(goes_on.set)
        assert until(lambda: not progress.is_held_up())
        assert not any(progress.is_held_up() for _ in range(1000))


def test_who_works_for_long_is_held_up() -> None:
    ends = threading.Event()

    def work() -> None:
        while not ends.is_set():
            os.urandom(1 << 22)

    with ExitStack() as stack:
        progress = in_thread(stack, work)
        stack.callback(ends.set)
        assert until(progress.is_held_up)
