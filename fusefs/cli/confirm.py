"""Questions to a person at a terminal."""

from __future__ import annotations

import os


def can_be_asked() -> bool:
    """Whether there is a person who reads it and can answer."""
    return os.isatty(0) and os.isatty(2)


def is_confirmed(question: str) -> bool:
    """Whether the answer is yes. Raises  KeyboardInterrupt instead of an answer"""
    import click  # a command that asks nothing may do without

    try:
        return click.confirm(question, err=True)
    except click.Abort:
        raise KeyboardInterrupt from None
