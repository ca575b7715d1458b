"""Writing a registry: whole, under a lock, without the stores that are gone."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from fusefs.core.identity import Likelihood, compare
from fusefs.linux.atomic_files import replace_file
from fusefs.linux.fd import Fd
from fusefs.linux.file_locks import take
from fusefs.linux.kernel import Kernel
from fusefs.linux.mountinfo import read_mounts
from fusefs.linux.runtime_directories import lasting_dir, make_dir
from fusefs.store.registry_lines import (
    MAX_BYTES,
    MAX_LINES,
    STORES,
    RegistryLine,
    decode,
    encode,
    open_directory,
    read_registry,
)
from fusefs.store.registry_targets import LineOf, RegistryTarget, follow

_MODE = 0o600
_GLANCES, _GLANCE_S = 50, 0.01


def write(kernel: Kernel, one: RegistryLine) -> str:
    """Add a line to the caller's registry; why it does not have it now, a clause for a person, or nothing.

    Raises  OSError
    """
    path = make_dir(lasting_dir())
    lock = _lock(path)
    if lock is None:
        return "another process keeps its lock"
    with lock, open_directory(path) as directory:
        try:
            lines = decode(read_registry(directory))
        except FileNotFoundError:
            lines = []
        kept = [*_still_needed(kernel, lines, one), one]
        text = b"".join(map(encode, kept))
        if len(text) > MAX_BYTES or len(kept) > MAX_LINES:
            return "it is full of stores that are there"
        replace_file(os.path.join(path, STORES), text, _MODE, is_durable=True)
        os.fsync(directory)
    return ""


def _lock(path: bytes) -> Fd | None:
    """The registry's lock. Its holder is about to write; a stopped one is not waited for long."""
    for _glance in range(_GLANCES):
        lock = take(path, STORES + b".lock")
        if lock is not None:
            return lock
        time.sleep(_GLANCE_S)
    return None


def _still_needed(kernel: Kernel, lines: Sequence[RegistryLine], one: RegistryLine) -> list[RegistryLine]:
    """The lines that stay beside a new one; if there are too many, none that leads nowhere at the moment."""
    words = [LineOf(os.geteuid(), line) for line in lines]
    followed = [(word.line, lead) for word, lead in follow(kernel, words, read_mounts())]
    kept = [
        (line, lead) for line, lead in followed if lead is not RegistryTarget.GONE and not _replaces(one, line, lead)
    ]
    n_bytes = sum(len(encode(line)) for line, _lead in kept) + len(encode(one))
    if len(kept) >= MAX_LINES or n_bytes > MAX_BYTES:
        kept = [(line, lead) for line, lead in kept if lead is not RegistryTarget.ABSENT]
    return [line for line, _lead in kept]


def _replaces(one: RegistryLine, line: RegistryLine, lead: RegistryTarget) -> bool:
    """Whether a new line says of an old one's store where it is now."""
    if one.volume != line.volume:
        return False
    known = compare(one.identity, line.identity)
    return one.path == line.path or (known is Likelihood.SAME and lead is not RegistryTarget.THERE)
