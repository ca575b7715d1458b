"""The base class of the application, which runs other trashd commands and reads their output.

Each command runs in a process of its own: to act as an orphan's owner, a command forks, but this process must not fork,
since it has threads. A command that waits for a dead server, or is killed, does not block the screen.
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

from fusefs.core.printable_names import printable_text

_PATIENCE_S = 5.0


class CommandApp(App[int]):
    """An application that does its work through other trashd commands.

    typed_s  when the user last pressed a key (time.monotonic)
    """

    def __init__(self, trashd: Sequence[str]) -> None:
        """trashd: the argv that starts trashd."""
        super().__init__(ansi_color=True)
        self.theme = "ansi-dark"
        self.commands = OtherCommands(trashd)
        self.typed_s = time.monotonic()

    async def on_event(self, event: events.Event) -> None:
        """Record the time of each key press."""
        if isinstance(event, events.Key):
            self.typed_s = time.monotonic()
        await super().on_event(event)

    def reload(self) -> None:
        """Refresh the current screen after a command changed something."""
        raise NotImplementedError

    def show_message(self, *lines: str) -> None:
        raise NotImplementedError


class CommandAnswer(NamedTuple):
    """The result of a command. out, err: lines that are safe for a terminal; objects: the converted JSON objects"""

    code: int
    out: list[str]
    err: list[str]
    objects: list[Any]


class OtherCommands:
    """Runs other trashd commands and ends them when the application quits."""

    def __init__(self, trashd: Sequence[str]) -> None:
        self._trashd = trashd
        self._runs: dict[asyncio.Future[tuple[int, bytes, bytes]], _Run] = {}
        self._is_ending = False

    def doing(self) -> list[str]:
        """Return descriptions of what the running commands are changing."""
        return [run.doing for run in self._runs.values() if run.doing]

    async def ask(self, read: Callable[[dict[str, Any]], object], *words: str | bytes) -> CommandAnswer:
        """Run a command with `--json` and read its output. read: called in a thread to convert each object"""
        code, out, err = await self._run_command(words, "")
        # With 100,000 orphans, this takes a second.
        objects = await asyncio.to_thread(
            lambda: [read(json.loads(line)) for line in out[: out.rfind(b"\n") + 1].splitlines()]
        )
        self._check_ending()
        return CommandAnswer(code, [], _lines(err), objects)

    async def act(self, doing: str, *words: str | bytes) -> CommandAnswer:
        """Run a command that changes something. doing: a description of the change"""
        code, out, err = await self._run_command(words, doing)
        return CommandAnswer(code, _lines(out), _lines(err), [])

    async def _run_command(self, words: Sequence[str | bytes], doing: str) -> tuple[int, bytes, bytes]:
        """Run a command. Raises  CancelledError when the application quits"""
        self._check_ending()
        run = _Run(doing)
        talk = asyncio.ensure_future(run.talk(*self._trashd, *words))
        self._runs[talk] = run
        talk.add_done_callback(self._runs.pop)
        try:
            code, out, err = await asyncio.shield(talk)
            self._check_ending()
        except (
            asyncio.CancelledError
        ):  # the screen that started the command is gone; the command still has to close its pipes
            run.stop()
            raise
        return code, out, err if code >= 0 else err + f"the command was terminated by signal {-code}\n".encode()

    def _check_ending(self) -> None:
        """Raise CancelledError if the application is quitting, since no screen could show a result any more."""
        if self._is_ending:
            raise asyncio.CancelledError

    async def end(self) -> None:
        """Stop all running commands and start no others. Nothing is lost: the next reap continues a stopped reap."""
        self._is_ending = True
        for run in self._runs.values():
            run.stop()
        if self._runs:
            await asyncio.wait(self._runs, timeout=_PATIENCE_S)  # a command may be waiting for a dead disk


class _Run:
    """A running command. doing: a description of what it changes; empty if it only reads"""

    def __init__(self, doing: str) -> None:
        self.doing = doing
        self._process: Process | None = None
        self._is_stopped = False

    async def talk(self, *words: str | bytes) -> tuple[int, bytes, bytes]:
        """Run the command; return its exit code (or the negative number of a signal), stdout and stderr."""
        process = await asyncio.create_subprocess_exec(*words, stdin=DEVNULL, stdout=PIPE, stderr=PIPE)
        self._process = process
        if self._is_stopped:
            self.stop()
        out, err = await process.communicate()
        return process.returncode or 0, out, err

    def stop(self) -> None:
        """Send SIGTERM to the command, now or as soon as it has started."""
        self._is_stopped = True
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.terminate()


def _lines(text: bytes) -> list[str]:
    """Split output into lines that are safe for a terminal, with JSON errors as plain text."""
    text_lines = []
    for line in text.decode("utf-8", "backslashreplace").splitlines():
        if line.startswith('{"error"'):
            error = json.loads(line)
            text_lines += [error["message"], f"  hint: {error['hint']}"] if error["hint"] else [error["message"]]
        else:
            text_lines.append(line.removeprefix("trashd: "))
    return [printable_text(line) for line in text_lines]
