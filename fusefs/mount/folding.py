"""Where names are the same in upper and lower case."""

from __future__ import annotations

from fusefs.core.inodes import ROOTS, Node
from fusefs.linux.casefold import folds_case, folds_throughout
from fusefs.linux.fd import Fd
from fusefs.mount.gate import Gate


class Folding:
    """Of one mounted tree, by directory."""

    def __init__(self, root: Fd, dev: int, gate: Gate) -> None:
        """root: the backing tree's directory. dev: its st_dev"""
        self._everywhere = folds_throughout(root)
        self._dev = dev
        self._gate = gate
        self._known: dict[Node, bool] = {}

    def folds(self, directory: Node, fd: Fd) -> bool:
        """Whether names in a directory are the same in upper and lower case. fd: of it"""
        if self._everywhere is not None and directory.source[0] == self._dev:
            return self._everywhere
        folds = self._known.get(directory)
        if folds is None:
            folds = self._gate.call(folds_case, fd)
            if directory.nlookup or directory.n_open or directory.nodeid in ROOTS:  # who ends tells
                self._known[directory] = folds
        return folds

    def drop(self, directory: Node) -> None:
        """A node has ended."""
        self._known.pop(directory, None)
