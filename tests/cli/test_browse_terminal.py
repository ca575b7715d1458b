"""`trashd browse` on terminals: real keys, no colours, signals, and where it can't be."""

import os
import re
import signal
from pathlib import Path

import pytest

from tests.support.foreground_mount import until
from tests.support.make_trees import make_tree
from tests.support.terminals import Terminal, TmuxSession
from tests.support.trashd_command import done_well, swapped

COLOURS = re.compile(r"\x1b\[[\d;]*\b(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])[;m]")

SEEN = (r"\x1b]2;stolen\x07/", r"\x1b[2J\x1b[31mred/", r"\x9b31m/", "[red]m[]/", r"new\x0aline/")


def hostile(volume: Path) -> Path:
    """A tree whose names would do something to a terminal."""
    job = make_tree(volume / "job", {"results": {"a.csv": "content"}})
    for name in (b"\x1b]2;stolen\x07", b"\x1b[2J\x1b[31mred", b"\x9b31m", b"[red]m[]", b"new\nline"):
        os.mkdir(os.path.join(os.fsencode(job), name))
    swapped(job)
    return job


@pytest.mark.needs("root", "tmux")
@pytest.mark.parametrize("variables", [{}, {"NO_COLOR": "1"}, {"TERM": "vt100"}], ids=str)
def test_real_keys_do_it_on_a_real_terminal(volume: Path, tmp_path: Path, variables: dict[str, str]) -> None:
    job = hostile(volume)
    with TmuxSession(tmp_path, "browse", "--volume", volume, **variables) as terminal:
        title = terminal.title()
        terminal.wait_for("1 orphan", "23h59m", "Enter open  r restore  k keep", "q quit")
        assert bool(COLOURS.search(terminal.screen("-e"))) == (not variables)
        terminal.type("Enter")
        terminal.wait_for("results/", *SEEN)
        assert terminal.title() == title
        terminal.type("/", "c", "s", "v")
        terminal.wait_for("no matching entries")
        terminal.type("Escape")
        terminal.wait_for("results/")
        terminal.type("End", "Up")
        terminal.wait_for("5/6", "\nresults/")
        terminal.type("Right")
        terminal.wait_for("a.csv")
        terminal.type("r")
        terminal.wait_for("Restore", "(its original path)")
        terminal.type("Enter")
        terminal.wait_for("restored")
        terminal.type("Left")
        terminal.wait_for("results/")
        terminal.type("?")
        terminal.wait_for("Keys")
        terminal.type("Escape")
        terminal.wait_for("results/")
        terminal.type("q")
        assert terminal.end() == 0
    assert (job / "results/a.csv").read_text() == "content"


@pytest.mark.needs("root", "tmux")
def test_it_goes_with_its_terminal(volume: Path, tmp_path: Path) -> None:
    with TmuxSession(tmp_path, "browse", "--volume", volume) as terminal:
        terminal.wait_for("no orphans")
        pid = terminal.pid()
        terminal.hang_up()
    assert until(lambda: not Path(f"/proc/{pid}").exists(), 60)


@pytest.mark.needs("root")
def test_a_signal_ends_it_and_leaves_the_terminal_as_it_was(volume: Path) -> None:
    terminal = Terminal("browse", "--volume", volume)
    terminal.wait_for("no orphans")
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.end() == 143
    assert terminal.output.rindex("\x1b[?1049l") > terminal.output.rindex("no orphans")
    assert terminal.output.rindex("\x1b[?25h") > terminal.output.rindex("\x1b[?25l")


@pytest.mark.parametrize("term", ["dumb", "unknown", ""])
def test_a_terminal_that_can_not_place_its_cursor_is_refused(term: str) -> None:
    terminal = Terminal("browse", TERM=term)
    assert terminal.end() == 3
    assert "trashd list" in terminal.output
    assert "\x1b" not in terminal.output


def test_a_terminal_that_is_not_described_here_is_tried(tmp_path: Path) -> None:
    terminal = Terminal("browse", "--volume", tmp_path, TERM="terminal-of-tomorrow")
    terminal.wait_for("no orphans")
    terminal.type("q")
    assert terminal.end() == 0


def test_without_its_extra_it_says_how_to_have_it(tmp_path: Path) -> None:
    (tmp_path / "textual.py").write_text("raise ModuleNotFoundError(\"No module named 'textual'\", name='textual')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    terminal = Terminal("browse", PYTHONPATH=path)
    assert terminal.end() == 3
    assert "pipx inject trashd textual" in terminal.output
    assert "trashd browse" in done_well("browse", "--help").out


@pytest.mark.parametrize("version", ["0.1.13", "2.1.2", "8.2.4"])
def test_a_textual_that_is_too_old_is_named(tmp_path: Path, version: str) -> None:
    information = tmp_path / f"textual-{version}.dist-info/METADATA"
    information.parent.mkdir()
    information.write_text(f"Metadata-Version: 2.1\nName: textual\nVersion: {version}\n")
    terminal = Terminal("browse", PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert terminal.end() == 3
    assert f"or later, and this is {version}" in terminal.output
    assert "docs/howto/install.md" in terminal.output
