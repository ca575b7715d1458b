"""Gates are ended, whatever lies in them; what can't be ended is waited for, but for so long and no longer."""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from fusefs.core.names import Name
from fusefs.linux.kernel import Kernel
from fusefs.store import gate as gate_module
from fusefs.store.gate import empty_into
from fusefs.store.layout import GATE_PREFIX
from tests.support.make_trees import make_tree

GATE, INNER, INMOST = ((GATE_PREFIX + name).decode() for name in (b"0", b"1", b"2"))
N_TRIES = 5


def _empty(kernel: Kernel, container: Path) -> None:
    with ExitStack() as opened:
        fds = [opened.enter_context(kernel.open_path(os.fsencode(path))) for path in (container / GATE, container)]
        empty_into(kernel, fds[0], fds[1], Name(GATE.encode()), fds[1])


def test_what_lies_in_a_gate_in_a_gate_is_the_containers(tmp_path: Path) -> None:
    make_tree(tmp_path / GATE, {INNER: {INMOST: {"tree": {"file": "1"}}}, "fresh": {"x": "2"}})
    _empty(Kernel(), tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["fresh", "tree"]
    assert (tmp_path / "tree/file").read_text() == "1"


def test_a_gate_in_a_gate_is_waited_for_as_long_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "_N_TRIES", N_TRIES)
    make_tree(tmp_path / GATE, {INNER: {INMOST: {"tree": {"file": "1"}}}})
    n_asked = 0

    def refuse(call: str) -> None:
        nonlocal n_asked
        if call == "renameat2":
            n_asked += 1
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    with pytest.raises(OSError, match="busy"):
        _empty(Kernel(refuse), tmp_path)
    assert n_asked == N_TRIES
    assert (tmp_path / GATE / INNER / INMOST / "tree/file").read_text() == "1"
