"""Questions and answers in the middle of the screen, answered by keys."""

from __future__ import annotations

from typing import ClassVar, TypeVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Static

T = TypeVar("T")


class _Dialog(ModalScreen[T]):
    """A heading, what is told, and which keys answer it."""

    AUTO_FOCUS = ""

    def __init__(self, heading: str, lines: list[str], keys: str) -> None:
        super().__init__()
        self._heading, self._lines, self._keys = heading, lines, keys

    def compose(self) -> ComposeResult:
        """See Screen."""
        with VerticalScroll(classes="dialog"):
            yield Static(Content(self._heading).stylize("bold"))
            yield Static(Content("\n".join(["", *self._lines, ""])))
            yield from self.compose_answer()
            yield Static(Content(self._keys))

    def compose_answer(self) -> ComposeResult:
        """Where it is typed, if it is."""
        yield from ()

    def action_scroll(self, n_lines: int) -> None:
        """Read on, where there is more than fits."""
        self.query_one(VerticalScroll).scroll_relative(y=n_lines, animate=False)


class Notice(_Dialog[None]):
    """Something to be read."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,enter,space,q", "dismiss", show=False),
        Binding("up", "scroll(-1)", show=False),
        Binding("down", "scroll(1)", show=False),
    ]

    def __init__(self, heading: str, lines: list[str]) -> None:
        super().__init__(heading, lines, "Enter: go on")


class YesOrNo(_Dialog[bool]):
    """A question that only `y` answers with yes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", show=False),
        Binding("n,escape,enter,q", "dismiss(False)", show=False),
        Binding("up", "scroll(-1)", show=False),
        Binding("down", "scroll(1)", show=False),
    ]

    def __init__(self, question: str, lines: list[str], yes: str) -> None:
        """yes: what `y` does"""
        super().__init__(question, lines, f"y: {yes}   n, Esc: no")


class LineTyped(_Dialog[str | None]):
    """What is typed on a line; None: nothing is to be done."""

    AUTO_FOCUS = "Input"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", show=False)]

    def __init__(self, heading: str, lines: list[str], nothing: str, enter: str) -> None:
        """nothing: what it means to type nothing; enter: what Enter does"""
        super().__init__(heading, lines, f"Enter: {enter}   Esc: no")
        self._nothing = nothing

    def compose_answer(self) -> ComposeResult:
        """See _Dialog."""
        yield Input(compact=True, select_on_focus=False, placeholder=f"({self._nothing})")
        yield Static("")

    def on_input_submitted(self, typed: Input.Submitted) -> None:
        """It is typed."""
        self.dismiss(typed.value.strip())
