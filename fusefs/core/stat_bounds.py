"""What a selection asks of an entry's stat: size, times and owner. In Python, or packed for the same in C."""

from __future__ import annotations

import stat
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal, NamedTuple, Protocol

Field = Literal["mtime", "atime", "ctime", "btime"]

_MOST: Final = 1 << 100
_LEAST: Final = -_MOST
_ANY: Final = (_LEAST, _MOST)
_ANY_SIZE: Final = (0, _MOST)
_WORD: Final = (1 << 63) - 1
"""Packed, it is without end."""
TIMES: Final[tuple[Field, ...]] = ("mtime", "atime", "ctime", "btime")
_PACKED: Final = struct.Struct("=12qI2B")
"""struct bounds of linux/native/look.c"""
_WHOEVER: Final = -1


class SizeBound(NamedTuple):
    """Sizes in bytes, from and to, both included; most None: without end."""

    least: int = 0
    most: int | None = None


class TimeBound(NamedTuple):
    """Times in nanoseconds since the epoch, later than one and earlier than another; None: whenever."""

    field: Field
    after_ns: int | None = None
    before_ns: int | None = None


class SelectionStat(Protocol):
    """What os.stat tells, as far as it matters."""

    @property
    def st_mode(self) -> int: ...
    @property
    def st_size(self) -> int: ...
    @property
    def st_uid(self) -> int: ...
    @property
    def st_gid(self) -> int: ...
    @property
    def st_atime_ns(self) -> int: ...
    @property
    def st_mtime_ns(self) -> int: ...
    @property
    def st_ctime_ns(self) -> int: ...


Check = Callable[[SelectionStat, int | None], bool]
Bound = tuple[int, int]
"""From and to, both included."""


class StatBounds(NamedTuple):
    """All that must hold; as wide as can be where nothing is asked.

    size         in bytes
    times        in nanoseconds since the epoch, by TIMES
    asks_birth   the last of them: an entry whose birth is not known is not taken
    uids, gids   all of them: two that differ are nobody's
    must_be_empty  a file without a byte; or a directory, whose reader looks
    """

    size: Bound = _ANY_SIZE
    times: tuple[Bound, Bound, Bound, Bound] = (_ANY,) * 4
    asks_birth: bool = False
    uids: frozenset[int] = frozenset()
    gids: frozenset[int] = frozenset()
    must_be_empty: bool = False

    def checks(self) -> list[Check]:
        """What asks one thing each."""
        checks: list[Check] = []
        if self.size != _ANY_SIZE:
            checks.append(_is_sized(self.size))
        checks += [
            _is_timed(f"st_{name}_ns", bound)
            for name, bound in zip(TIMES[:3], self.times[:3], strict=True)
            if bound != _ANY
        ]
        if self.asks_birth:
            checks.append(_is_born(self.times[3]))
        if self.uids:
            checks.append(lambda st, _btime_ns: {st.st_uid}.issuperset(self.uids))
        if self.gids:
            checks.append(lambda st, _btime_ns: {st.st_gid}.issuperset(self.gids))
        if self.must_be_empty:
            checks.append(_is_empty)
        return checks

    def takes(self) -> Check:
        """What asks for all of it."""
        checks = self.checks()
        if len(checks) == 1:
            return checks[0]

        def hold(st: SelectionStat, btime_ns: int | None = None) -> bool:
            for check in checks:  # noqa: SIM110  a generator takes three times as long
                if not check(st, btime_ns):
                    return False
            return True

        return hold

    def packed(self, formats: Iterable[int]) -> bytes | None:
        """For one call that looks at many; None: 64 bits have no room for a time that is asked for.

        formats  the types that are meant, as listings tell them (d_type)
        """
        size = self.size if len(self.uids) < 2 and len(self.gids) < 2 else (1, 0)
        bounds = [value for bound in (size, *self.times) for value in bound]
        if any(_WORD <= abs(value) < _MOST for value in bounds):
            return None
        owners = [next(iter(ids), _WHOEVER) for ids in (self.uids, self.gids)]
        kinds = sum(1 << format_ for format_ in formats)
        words = [max(-_WORD, min(value, _WORD)) for value in bounds]
        return _PACKED.pack(*words, *owners, kinds, self.asks_birth, self.must_be_empty)


def stat_bounds(
    sizes: Iterable[SizeBound],
    times: Iterable[TimeBound],
    uids: Iterable[int],
    gids: Iterable[int],
    *,
    must_be_empty: bool,
) -> StatBounds:
    """What must hold if all of some bounds must."""
    least, most = [bound.least for bound in sizes], [bound.most for bound in sizes]
    mtime, atime, ctime, btime = [
        (
            _within(max, [bound.after_ns for bound in times if bound.field == name], _LEAST, 1),
            _within(min, [bound.before_ns for bound in times if bound.field == name], _MOST, -1),
        )
        for name in TIMES
    ]
    return StatBounds(
        (_within(max, least, 0), _within(min, most, _MOST)),
        (mtime, atime, ctime, btime),
        any(bound.field == "btime" for bound in times),
        frozenset(uids),
        frozenset(gids),
        must_be_empty,
    )


def _within(closest: Callable[[Iterable[int]], int], bounds: Sequence[int | None], widest: int, step: int = 0) -> int:
    """The closest of some bounds. step: from one that is not included to one that is"""
    told = [bound + step for bound in bounds if bound is not None]
    return closest([widest, *told])


def _is_sized(bound: Bound) -> Check:
    least, most = bound
    return lambda st, _btime_ns: least <= st.st_size <= most


def _is_timed(name: str, bound: Bound) -> Check:
    from_ns, to_ns = bound
    return lambda st, _btime_ns: from_ns <= getattr(st, name) <= to_ns


def _is_born(bound: Bound) -> Check:
    from_ns, to_ns = bound
    return lambda _st, btime_ns: bool(btime_ns) and from_ns <= (btime_ns or 0) <= to_ns


def _is_empty(st: SelectionStat, _btime_ns: int | None) -> bool:
    return st.st_size == 0 if stat.S_ISREG(st.st_mode) else stat.S_ISDIR(st.st_mode)
