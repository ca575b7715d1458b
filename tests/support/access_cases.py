"""Scenes, one act on a file each: drawn by their number, acted on a plain directory and through a mount, and compared.

A scene is a directory of its own with a thing in it (f), which a user looks at in some way, which root may change
then, and to which the user does something. What came of it is the answer, and what is left.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from tests.support.access_calls import ACTS, DIRECTORY, FD, FILE, KERNEL, NAME
from tests.support.acls import GROUP, GROUP_OBJ, MASK, NOBODY, OTHER, USER, USER_OBJ, acl
from tests.support.privileges import HE, MATE, OTHERS, PEOPLE, STRANGER, TEAM

T = TypeVar("T")

Owner = tuple[int, int]

WEIGHTS = {"owner": 5, "owner in the team": 4, "team": 3, "team besides": 3, "stranger": 3, "root": 3}
"""Of people; of all others 1."""
OWNERS: Mapping[Owner, int] = MappingProxyType(
    {
        (HE, HE): 5, (HE, TEAM): 5, (OTHERS, TEAM): 3, (0, TEAM): 2, (0, 0): 2, (OTHERS, OTHERS): 2, (HE, 0): 1,
        (STRANGER, STRANGER): 1, (MATE, TEAM): 1, (MATE, HE): 1,
    }
)  # fmt: skip
FILE_MODES = {
    0o644: 4, 0o600: 3, 0o664: 3, 0o666: 2, 0o660: 2, 0o755: 2, 0o777: 2, 0o400: 1, 0o000: 1, 0o604: 1, 0o466: 1,
    0o711: 2, 0o4755: 2, 0o2755: 2, 0o2745: 1, 0o6777: 2, 0o4666: 1, 0o6766: 2, 0o2070: 1,
}  # fmt: skip
DIRECTORY_MODES = {
    0o755: 4, 0o777: 5, 0o1777: 4, 0o775: 2, 0o770: 2, 0o2775: 3, 0o3777: 2, 0o700: 1, 0o711: 1, 0o733: 1, 0o1770: 1,
    0o555: 1, 0o707: 1,
}  # fmt: skip
ACLS = {"": 8, "he rw": 2, "he none": 2, "he rwx, mask r": 2, "team rwx": 1, "team none": 1, "strangers rwx": 1}
"""The user that a named entry is for."""
LOOKS = ("stat", "list", "read", "missing", "access", "attributes", "root's stat", "open")
CHANGES = {
    "none": 0,
    "f is root's": 3, "f is root's and closed": 2, "f is another's": 2, "f is his": 2, "f is the team's": 1,
    "f is closed": 2, "f is open": 2, "f is a set-ID program": 1, "f denies him": 1, "f lets him": 1,
    "f is replaced": 2, "f is away": 1, "f is gone": 1,
    "d is root's": 2, "d is root's and closed": 2, "d is sticky": 2, "d is open": 2, "d is his": 1, "d denies him": 1,
    "d is replaced": 1, "e is closed": 1,
}  # fmt: skip
BY = ": "
"""Between a user's name and the act, for a change that isn't root's."""
MEDDLING = tuple(
    name for name, act in ACTS.items() if NAME in act.by and act.reaches != KERNEL and name != "chown to nobody else"
)
"""What that is: not what can't be told from a write to come."""
BEFORE, AT_ONCE, LATER = "before he looked", "since he looked", "long since he looked"
DURING, AFTER = "while he acts", "when he has acted"
"""Not drawn: for races."""
AT_A_STROKE = frozenset(change for change in CHANGES if not change.endswith(("closed", "sticky", "him", "replaced")))
"""Changes of one system call."""


@dataclass(frozen=True, slots=True)
class AccessScene:
    """One combination. Modes and ACLs are as root set them at the beginning."""

    number: int
    person: str
    act: str
    by: str  # how f is named
    base: str  # how d is
    kind: str  # of f
    mode: int
    owner: Owner
    acl: str
    d_mode: int
    d_owner: Owner
    d_acl: str
    d_default: bool  # d has a default ACL
    e_mode: int
    e_owner: Owner
    g_owner: Owner
    umask: int
    looks: tuple[str, ...]
    is_made_behind: bool
    change: str
    when: str

    def __str__(self) -> str:
        looks = ", ".join(self.looks) or "nothing"
        return (
            f"scene {self.number}: {self.person}: {self.act}, f by {self.by}, d by {self.base}, umask {self.umask:o}; "
            f"f: {self.kind} {_whose(self.mode, self.owner, self.acl)}; "
            f"d: {_whose(self.d_mode, self.d_owner, self.d_acl)}{', default ACL' * self.d_default}; "
            f"e: {_whose(self.e_mode, self.e_owner)}; g: {_whose(0o644, self.g_owner)}; "
            f"made {'behind' if self.is_made_behind else 'through'} the mount; looked at: {looks}"
            + ("" if self.change == "none" else f"; {self.change}, {self.when}")
        )


def _whose(mode: int, owner: Owner, acl: str = "") -> str:
    return f"{mode:04o} {owner[0]}:{owner[1]}" + (f" ACL {acl}" if acl else "")


def draw(number: int, *, has_changes: bool, acts: Sequence[str] = ()) -> AccessScene:
    """The scene of that number, always the same one.

    has_changes  root always changes something; else a user does sometimes
    acts         that any user may do; none: all
    """
    rng = random.Random(number)
    act = rng.choice(acts or list(ACTS))
    of = ACTS[act]
    by = rng.choice(of.by)
    kind = rng.choice(of.kinds)
    modes = DIRECTORY_MODES if kind == DIRECTORY else FILE_MODES
    d_owner = _one_of(rng, OWNERS)
    people = {name: WEIGHTS.get(name, 1) for name in PEOPLE}
    change = _one_of(rng, {**CHANGES, "none": 0 if has_changes else 30})
    meddling = [one for one in MEDDLING if not acts or one in acts]
    if meddling and not has_changes and rng.random() < 0.4:
        change = f"{_one_of(rng, people)}{BY}{rng.choice(meddling)}"
    return AccessScene(
        number,
        person=_one_of(rng, people),
        act=act,
        by=by,
        base=rng.choice((NAME, NAME, FD, "cwd")),
        kind=kind,
        mode=_one_of(rng, modes),
        owner=_one_of(rng, OWNERS),
        acl=_one_of(rng, ACLS) if kind in (FILE, DIRECTORY) else "",
        d_mode=_one_of(rng, DIRECTORY_MODES),
        d_owner=d_owner,
        d_acl=_one_of(rng, ACLS) if rng.random() < 0.3 else "",
        d_default=rng.random() < 0.2,
        e_mode=_one_of(rng, DIRECTORY_MODES),
        e_owner=rng.choice((d_owner, d_owner, (0, 0))),
        g_owner=_one_of(rng, OWNERS),
        umask=rng.choice((0, 0o022, 0o027)),
        looks=tuple(rng.sample(LOOKS, rng.randint(0, 4))),
        is_made_behind=rng.random() < 0.5,
        change=change,
        when=rng.choice((BEFORE, AT_ONCE, AT_ONCE, LATER)),
    )


def _one_of(rng: random.Random, weights: Mapping[T, int]) -> T:
    return rng.choices(list(weights), list(weights.values()))[0]


def acl_of(name: str, mode: int) -> bytes:
    """A file's ACL, its owner's and others' rights those of the mode."""
    entries = [(USER_OBJ, mode >> 6 & 7, NOBODY), (GROUP_OBJ, mode >> 3 & 7, NOBODY), (OTHER, mode & 7, NOBODY)]
    whose, _, how = name.rpartition(" ") if "," not in name else name.partition(",")[0].rpartition(" ")
    tag, gid = (GROUP, TEAM) if whose == "team" else (USER, STRANGER if whose == "strangers" else HE)
    rights = sum(bit for letter, bit in (("r", 4), ("w", 2), ("x", 1)) if how != "none" and letter in how)
    entries.append((tag, rights, gid))
    entries.append((MASK, 4 if name.endswith("mask r") else 7, NOBODY))
    return acl(*sorted(entries))
