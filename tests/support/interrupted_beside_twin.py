"""Commands on the first of two twins, and what must hold of its store whatever is at work beside them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from tests.support.asked_directly import asked_directly
from tests.support.interrupted_command import BROKEN, Ended, command_as
from tests.support.plain_twin import MARK, Step, Twins
from tests.support.privileges import Person
from tests.support.store_calls import entries, problems

_BY_THE_KERNEL = 11


def ask(
    twins: Twins,
    person: Person,
    words: str,
    identifier: str = "",
    moment: int = -1,
    act: Sequence[Step] = (),
    look: Callable[[], object] = bool,
) -> Ended:
    """A command, and the act before its call number `moment`, if it makes so many; a look just before the act."""
    told = [word.replace("VOLUME", str(twins.first.volume)).replace("ID", identifier) for word in words.split()]
    with asked_directly() if moment < 0 else nullcontext():
        ended = command_as(person, told, moment, lambda: (look(), twins.act(twins.first, act)))
    assert ended.code not in (BROKEN, _BY_THE_KERNEL), ended
    assert "Traceback" not in ended.told, ended
    return ended


def untold(twins: Twins) -> list[str]:
    """Contents in the store that neither list nor checker says anything of; what was dropped is not in it yet."""
    volume = twins.first.volume
    told = {os.fsdecode(entry.path) for entry in entries(volume)} | {problem.where for problem in problems(volume)}
    found = [str(path) for path in (volume / ".trashd").rglob("*") if "drop" not in path.parts and _counts(path)]
    return [path for path in found if not any(where in path for where in told)]


def _counts(path: Path) -> bool:
    return path.is_file() and path.read_text(errors="replace").startswith(MARK)
