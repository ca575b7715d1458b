"""Ids of orphans as a shell completes them: the caller's own, in a moment, whatever hangs somewhere."""

from __future__ import annotations

import os
from typing import Any

import click
from click.shell_completion import CompletionItem

from fusefs.cli.options import ParamType, PathBytes
from fusefs.core.names import ID_RANDOM_CHARS

_LIMIT_S = 0.15


class OrphanId(ParamType[str]):
    """An id, or a part of one."""

    name = "id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """As it was typed."""
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Those of the caller's own orphans."""
        return _offered(incomplete)


class OrphanIdOrPath(PathBytes):
    """An id, or a path."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Ids, where it may be one."""
        offered = [] if "/" in incomplete or incomplete.startswith(".") else _offered(incomplete)
        return offered or super().shell_complete(ctx, param, incomplete)


def _offered(incomplete: str) -> list[CompletionItem]:
    """Ids that begin so, and the ends of those whose end does; with what they were."""
    from click.shell_completion import CompletionItem

    offered = []
    for identifier, origin in _own():
        if identifier.startswith(incomplete):
            offered.append(CompletionItem(identifier, help=origin))
        elif identifier[-ID_RANDOM_CHARS:].startswith(incomplete):
            offered.append(CompletionItem(identifier[-ID_RANDOM_CHARS:], help=origin))
    return offered


def _own() -> list[tuple[str, str]]:
    """The ids of what the caller has in all stores that are known, and where that came from; newest first.

    A child looks, as a dead mount blocks whoever looks at it: what it has not told in time is not offered. It has
    nothing of ours open, or a shell would wait for it that reads what we say to the end.
    """
    from fusefs.cli.output import origin
    from fusefs.linux.answer_timeout import ask_each
    from fusefs.linux.kernel import Kernel
    from fusefs.store.find_orphans import all_entries

    own = os.geteuid()

    def tell(_asked: None) -> bytes:
        found = (entry for entry in all_entries(Kernel(), (), []) if entry.uid == own)
        return "".join(f"{entry.id}\t{origin(entry.origin)}\n" for entry in found).encode()

    ((_asked, answer),) = ask_each((None,), tell, set(), lambda _asked: None, limit_s=_LIMIT_S)
    pairs = [line.split(b"\t", 1) for line in (answer or b"").split(b"\n")[:-1]]
    return [(identifier.decode(), origin.decode()) for identifier, origin in reversed(pairs)]
