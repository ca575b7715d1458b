"""What a folder's orphans take, as far as their records tell and memory allows; pure."""

from __future__ import annotations


class SizeSums:
    """Of orphans by their ids. What is not known, or finds no room, is not in it: it is for others to count those."""

    def __init__(self, most: int) -> None:
        """most: so many are remembered."""
        self._most = most
        self._sizes: dict[str, int] = {}
        self._seen: set[str] | None = None
        self.n_bytes = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def note(self, identifier: str, n_bytes: int | None) -> None:
        """What one takes; None: that is not known, or not any more."""
        self._drop(identifier)
        if n_bytes is not None and len(self._sizes) < self._most:
            self._sizes[identifier] = n_bytes
            self.n_bytes += n_bytes
            if self._seen is not None:
                self._seen.add(identifier)

    def forget(self, identifier: str) -> None:
        """It is gone."""
        self._drop(identifier)

    def look(self) -> None:
        """All that are there are noted from now on, until `looked`: what is not seen then is gone."""
        self._seen = set()

    def looked(self) -> None:
        """All were noted."""
        if self._seen is not None:
            for identifier in self._sizes.keys() - self._seen:
                self._drop(identifier)
            self._seen = None

    def _drop(self, identifier: str) -> None:
        self.n_bytes -= self._sizes.pop(identifier, 0)
