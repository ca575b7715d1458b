"""Why something was left that the kernel would have let go: our own reasons, beside errnos (`Failure.call`)."""

from __future__ import annotations

from collections.abc import Iterable

from fusefs.core.record import Failure

STORE = "store"
PINNED = "pinned"
CAME_IN = "came-in"
"""Of a directory that nobody can say was there when the tree came."""

WORDS = {
    STORE: "a trash store that holds something; restore what it holds (trashd list --volume DIR, where DIR is the "
    "directory above it), or trashd reap --with-stores ID deletes it too",
    PINNED: "kept in a trash store, and nothing deletes that from above; trashd restore it, or release it "
    "(trashd keep --release), with --volume DIR, where DIR is the directory above that store",
    CAME_IN: "it came in, or was changed, after the swap: who could move it need not be who may delete it; "
    "trashd quarantine restore ID takes it back, trashd quarantine delete ID deletes it",
}
"""What a person is told of each."""


def keeps_for_its_owner(failures: Iterable[Failure]) -> bool:
    """Whether something was left that is not root's to take over or to decide on: its owner may want it back."""
    return any(failure.call in WORDS for failure in failures)
