"""The explorer of late calls: what is known to go wrong is found, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.model_checker import Call, Explorer, Faults, Loss, ModelDisk, Program, disk_of, effect

NONE = Faults()
ROOT = disk_of({"/": {"d": "D"}, "D": {}})


def maker(who: str) -> Callable[[], Program]:
    """Looks whether there is a file, and makes a directory over it if not: the oldest race."""

    def make() -> Program:
        if (yield Call("look", ("D", "name"))) == "none":
            yield Call("mkdir", ("D", who, f"by-{who}"))
            yield Call("rename", ("D", who, "D", "name", ""))

    make.__name__ = who
    return make


def remover() -> Program:
    yield Call("mkdir", ("D", "mine", "M"))
    yield Call("rmdir", ("D", "mine"))


def why_replaced(before: ModelDisk, after: ModelDisk) -> str:
    was, now = (disk.of("D") or {} for disk in (before, after))
    return "replaced" if "name" in was and was["name"] != now.get("name") else ""


def why_there(disk: ModelDisk) -> str:
    return "mine is there" if "mine" in (disk.of("D") or {}) else ""


def explorer(*programs: Callable[[], Program], faults: Faults = NONE) -> Explorer:
    return Explorer(programs, ROOT, faults, why_replaced)


def test_a_look_before_a_rename_is_a_race() -> None:
    with pytest.raises(Loss) as loss:
        explorer(maker("a"), maker("b")).explore()
    assert str(loss.value).splitlines()[-1] == "replaced"
    assert len(str(loss.value).splitlines()) == 7


def test_one_alone_loses_no_race() -> None:
    assert explorer(maker("a")).explore() == 4


def test_each_order_of_the_calls_is_a_history() -> None:
    assert explorer(remover, maker("a")).explore() == 3 * 4


def test_a_history_is_found_again() -> None:
    found = set()
    for _ in range(2):
        with pytest.raises(Loss) as loss:
            explorer(maker("a"), maker("b"), faults=Faults(late=1)).explore()
        found.add(str(loss.value))
    assert len(found) == 1


@pytest.mark.parametrize(
    ("faults", "n_states"),
    [(Faults(), 3), (Faults(lost=1), 5), (Faults(late=1), 9), (Faults(twice=1), 9), (Faults(stale=1), 3)],
    ids=["none", "lost", "late", "twice", "stale"],
)
def test_a_fault_adds_its_histories_and_no_others(faults: Faults, n_states: int) -> None:
    assert explorer(remover, faults=faults).explore() == n_states


def test_who_comes_afterwards_clears_up() -> None:
    def cleaner() -> Program:
        yield Call("rmdir", ("D", "mine"))

    assert Explorer([remover], ROOT, Faults(), why_replaced, [cleaner], why_there).explore() == 3
    with pytest.raises(Loss, match="mine is there"):
        Explorer([remover], ROOT, Faults(), why_replaced, [], why_there).explore()


def test_a_late_call_finds_no_removed_directory() -> None:
    disk, answer = effect(ROOT, Call("rmdir", ("/", "d")))
    assert answer == "ok"
    assert effect(disk, Call("mkdir", ("D", "name", "N"))) == (disk, "ENOENT")


def test_no_directory_moves_into_itself() -> None:
    assert effect(ROOT, Call("rename", ("/", "d", "D", "inside", ""))) == (ROOT, "EINVAL")


def test_a_list_that_no_variable_has_is_refused() -> None:
    def hides() -> Program:
        for name in ("a", "b"):
            yield Call("look", ("D", name))

    with pytest.raises(TypeError, match="no variable"):
        explorer(hides).explore()
