"""Root registers a user's folder, and so moves it, between any two calls of that user's own commands: they find it."""

from pathlib import Path

import pytest

from tests.support.hostile_steps import ALICE, ROOT
from tests.support.interrupted_command import command_as
from tests.support.make_trees import Dir, make_tree
from tests.support.other_users import as_user
from tests.support.real_filesystems import tmpfs_volume
from tests.support.store_verbs import entries, init, swap
from tests.support.user_homes import forget_stores

pytestmark = pytest.mark.needs("root")

COMMANDS = (
    "list --json --volume VOLUME",
    "restore ID --volume VOLUME",
    "keep ID --volume VOLUME",
    "swap VOLUME/alice/job",
)
N_MOST, EACH = 600, 6
VOLUME = tmpfs_volume


def set_up(volume: Path, n: int) -> tuple[Path, str]:
    """A store of root's in which Alice made her own folder, and the id of what she threw away."""
    forget_stores()
    base = make_tree(volume / f"{n}", {"alice": Dir(owner=(ALICE.uid, ALICE.gid))})
    init(base)
    make_tree(base / "alice/job", Dir({"a": "1"}, owner=(ALICE.uid, ALICE.gid)))
    as_user(ALICE.uid, lambda: str(swap(base / "alice/job").id), gid=ALICE.gid)
    assert any((base / ".trashd/new").glob(f"{ALICE.uid}*"))
    [identifier] = [path.name for path in base.glob(".trashd/new/*/orphans/*")]
    return base, identifier


@pytest.mark.parametrize("words", COMMANDS)
def test_a_folder_that_is_registered_meanwhile_is_found(volume: Path, words: str) -> None:
    for n in range(0, N_MOST, EACH):
        base, identifier = set_up(volume, n)

        def register(base: Path = base) -> None:
            assert command_as(ROOT, [["list", "--volume", str(base)]], -1, bool).code == 0
            assert any((base / ".trashd/u").glob(f"{ALICE.uid}*"))

        told = [word.replace("VOLUME", str(base)).replace("ID", identifier) for word in words.split()]
        ended = command_as(ALICE, [told], n, register)
        assert ended.code in (0, 8), f"before call {n}: {ended}"
        if words.startswith("list"):
            assert identifier in ended.output, f"before call {n}: {ended}"
        assert len(list(base.glob(f".trashd/*/{ALICE.uid}*/orphans"))) == 1, f"before call {n}"
        assert words.startswith("restore") or identifier in {entry.id for entry in entries(base)}
        if not ended.acted:
            return
    pytest.fail("the command never came to its end without the act")
