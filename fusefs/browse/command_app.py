"""What screens find in the program that shows them, and other commands of trashd, run for who browses.

Each looks and acts as it does for whoever types it. A process for each, since a command acts as an orphan's owner by
forking, which a process with threads, as this one, must not do; and a command that waits for a dead server, or is
killed, takes nobody's screen with it.
"""

from __future__ import annotations

import asyncio
import json
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from textual import events
from textual.app import App

from fusefs.core.printable_names import show

_PATIENCE_S = 5.0


class CommandApp(App[int]):
    """A program whose work is done by other commands.

    commands  runs them
    typed_s   when a key was pressed last (time.monotonic)
    """

    def __init__(self, trashd: Sequence[str]) -> None:
        """trashd: the words by which it is started."""
        super().__init__(ansi_color=True)
        self.theme = "ansi-dark"
        self.commands = OtherCommands(trashd)
        self.typed_s = time.monotonic()

    async def on_event(self, event: events.Event) -> None:
        """See App: somebody is there."""
        if isinstance(event, events.Key):
            self.typed_s = time.monotonic()
        await super().on_event(event)

    def look(self) -> None:
        """Something was done: look again at what is seen."""
        raise NotImplementedError

    def tell(self, *lines: str) -> None:
        """Say what happened, on the screen that is seen by now."""
        raise NotImplementedError


class CommandAnswer(NamedTuple):
    """How a command ended. out, err: its lines, as a terminal may see them; what was read of JSON is in `objects`"""

    code: int
    out: list[str]
    err: list[str]
    objects: list[Any]


class OtherCommands:
    """Runs them."""

    def __init__(self, trashd: Sequence[str]) -> None:
        """trashd: the words by which it is started."""
        self._trashd = trashd
        self._runs: dict[asyncio.Future[tuple[int, bytes, bytes]], _Run] = {}
        self._is_ending = False

    def doing(self) -> list[str]:
        """What is being changed just now, in words."""
        return [run.doing for run in self._runs.values() if run.doing]

    async def ask(self, read: Callable[[dict[str, Any]], object], *words: str | bytes) -> CommandAnswer:
        """What a command with `--json` tells. read: what is made of each object; in a thread"""
        code, out, err = await self._run(words, "")
        # Of 100,000 orphans it takes a second.
        objects = await asyncio.to_thread(
            lambda: [read(json.loads(line)) for line in out[: out.rfind(b"\n") + 1].splitlines()]
        )
        self._check_ending()
        return CommandAnswer(code, [], _lines(err), objects)

    async def act(self, doing: str, *words: str | bytes) -> CommandAnswer:
        """What one tells that changes something. doing: what that is"""
        code, out, err = await self._run(words, doing)
        return CommandAnswer(code, _lines(out), _lines(err), [])

    async def _run(self, words: Sequence[str | bytes], doing: str) -> tuple[int, bytes, bytes]:
        """Raises  CancelledError when the program ends"""
        self._check_ending()
        run = _Run(doing)
        talk = asyncio.ensure_future(run.talk(*self._trashd, *words))
        self._runs[talk] = run
        talk.add_done_callback(self._runs.pop)
        try:
            code, out, err = await asyncio.shield(talk)
            self._check_ending()
        except asyncio.CancelledError:  # nobody wants to know any more; its pipes are closed all the same
            run.stop()
            raise
        return code, out, err if code >= 0 else err + f"it was ended by signal {-code}\n".encode()

    def _check_ending(self) -> None:
        """Raises  CancelledError when the program ends: what would be told has no place on the screen any more"""
        if self._is_ending:
            raise asyncio.CancelledError

    async def end(self) -> None:
        """End those that run, which loses nothing, and begin no other. With what a reap left the next one goes on."""
        self._is_ending = True
        for run in self._runs.values():
            run.stop()
        if self._runs:
            await asyncio.wait(self._runs, timeout=_PATIENCE_S)  # one may wait for a dead disk


class _Run:
    """A command that runs, or is about to. doing: what it changes, in words; empty: it only looks"""

    def __init__(self, doing: str) -> None:
        self.doing = doing
        self._process: Process | None = None
        self._is_stopped = False

    async def talk(self, *words: str | bytes) -> tuple[int, bytes, bytes]:
        """Its exit code, or the negative of the signal that ended it, and what it told."""
        process = await asyncio.create_subprocess_exec(*words, stdin=DEVNULL, stdout=PIPE, stderr=PIPE)
        self._process = process
        if self._is_stopped:
            self.stop()
        out, err = await process.communicate()
        return process.returncode or 0, out, err

    def stop(self) -> None:
        """As systemd and shells ask for it."""
        self._is_stopped = True
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.terminate()


def _lines(text: bytes) -> list[str]:
    """An error of JSON as people read it."""
    told = []
    for line in text.decode("utf-8", "backslashreplace").splitlines():
        if line.startswith('{"error"'):
            error = json.loads(line)
            told += [error["message"], f"  hint: {error['hint']}"] if error["hint"] else [error["message"]]
        else:
            told.append(line.removeprefix("trashd: "))
    return [show(line) for line in told]
