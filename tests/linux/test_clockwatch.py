"""A watch on the wall clock costs nothing while it is not set, which is not for tests: it is the whole machine's."""

from __future__ import annotations

import select

from fusefs.linux.clocks import ClockWatch


def test_it_says_nothing_while_nobody_sets_the_clock() -> None:
    with ClockWatch() as watch:
        assert select.select([watch], [], [], 0)[0] == []
        watch.seen()
        assert select.select([watch], [], [], 0)[0] == []
