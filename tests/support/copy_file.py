"""One file copied as a sweep copies it, and hooks for it."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from fusefs.linux.copy_inode import make_copy, open_original, verify
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.private_directory import PrivateDirectory
from tests.support.store_calls import Before, raw

numbers = itertools.count()
PREFIX = b".private-"


@contextmanager
def opened(path: Path) -> Iterator[Fd]:
    """A directory, readable."""
    with Fd(os.open(path, os.O_RDONLY | os.O_DIRECTORY)) as fd:
        yield fd


def yes() -> bool:
    """It goes on."""
    return True


def copy(source: Path, target: Path, kernel: Kernel | None = None, goes_on: Callable[[], bool] = yes) -> None:
    """A verified copy of a file under the same name in a directory."""
    kernel = kernel or Kernel()
    name = raw(source)[len(raw(source.parent)) + 1 :]
    with ExitStack() as owned:
        above = owned.enter_context(opened(source.parent))
        place = owned.enter_context(opened(target))
        private = owned.enter_context(PrivateDirectory(kernel, place, PREFIX))
        original = open_original(kernel, above, name)
        owned.enter_context(original.fd)
        asked = original.goes_on(kernel, goes_on)
        made = make_copy(kernel, original, place, private, asked)
        owned.enter_context(made.fd)
        try:
            verify(kernel, original, made, asked)
            if not original.is_untouched(kernel):
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
            made.put(kernel, place, name)
        except OSError:
            made.unname(kernel)
            raise


def refused(source: Path, target: Path, kernel: Kernel | None = None) -> int | None:
    """The errno of a copy that is refused; nothing of it is left."""
    with pytest.raises(OSError) as caught:  # noqa: PT011  the caller looks at the errno
        copy(source, target, kernel)
    assert os.listdir(target) == []
    return caught.value.errno


class Without:
    """A hook that refuses all calls of a name, and lets another see the rest."""

    def __init__(self, call: str, then: Callable[[str], None], number: int = errno.EINVAL) -> None:
        self.call = call
        self.then = then
        self.number = number

    def __call__(self, call: str) -> None:
        if call == self.call:
            raise OSError(self.number, os.strerror(self.number))
        self.then(call)


class After:
    """A hook that does something once, before the first call of a name after one of another."""

    def __init__(self, first: str, then: str, action: Callable[[], object]) -> None:
        self.first = first
        self.hook = Before(then, action)
        self.is_on = False

    def __call__(self, call: str) -> None:
        if self.is_on:
            self.hook(call)
        self.is_on |= call == self.first
