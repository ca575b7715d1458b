"""A person who presses keys in `trashd browse` and reads its screen; the screen is Textual's, without a terminal."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from html import unescape
from pathlib import Path

from textual.events import Paste
from textual.pilot import Pilot

from fusefs.browse.browser import Browser
from tests.support.trashd_command import TRASHD

_PATIENCE_S = 30.0
_PIECE = re.compile(r'<text [^>]*\bx="([\d.]+)"[^>]*\by="([\d.]+)"[^>]*clip-path[^>]*>([^<]*)</text>')


class Reader:
    """What a person sees and does."""

    def __init__(self, pilot: Pilot[int]) -> None:
        self._pilot = pilot

    def lines(self) -> list[str]:
        """The screen as it is now."""
        lines: dict[float, list[tuple[float, str]]] = {}
        for x, y, text in _PIECE.findall(self._pilot.app.export_screenshot()):
            lines.setdefault(float(y), []).append((float(x), unescape(text).replace("\xa0", " ")))
        return ["".join(text for _x, text in sorted(pieces)) for _y, pieces in sorted(lines.items())]

    def sees(self, words: str) -> bool:
        """Whether a line has them."""
        return any(words in line for line in self.lines())

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something."""
        end_s = time.monotonic() + _PATIENCE_S
        while not condition():
            assert time.monotonic() < end_s, "\n".join(self.lines())
            await self._pilot.pause(0.1)

    async def read(self, *words: str) -> None:
        """Wait until all of them are on the screen."""
        for one in words:
            await self.until(lambda one=one: self.sees(one))  # type: ignore[misc]

    async def lose(self, words: str) -> None:
        """Wait until they are not any more."""
        await self.until(lambda: not self.sees(words))

    async def press(self, *keys: str) -> None:
        """Press some keys."""
        await self._pilot.press(*keys)

    async def type(self, text: str) -> None:
        """Press the keys of a word, with small letters and digits."""
        await self.press(*text)

    async def paste(self, text: str) -> None:
        """Have a terminal type it."""
        self._pilot.app.post_message(Paste(text))
        await self._pilot.pause()

    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._pilot.app.return_code if self._pilot.app._exit else None


def browse(
    person: Callable[[Reader], Awaitable[None]],
    *volumes: Path,
    trashd: Sequence[str] = (TRASHD,),
    size: tuple[int, int] = (120, 30),
) -> None:
    """Have a person look through the stores of some volumes. trashd: the words that start the other commands"""

    async def session() -> None:
        app = Browser(trashd, [os.fsencode(volume) for volume in volumes])
        async with app.run_test(size=size) as pilot:
            await person(Reader(pilot))
            await app.commands.end()

    asyncio.run(session())
