"""`trashd browse`: a person presses keys, reads the screen, and the other commands do the work."""

import asyncio
import os
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from html import unescape
from pathlib import Path

import pytest
from textual.events import Paste
from textual.pilot import Pilot

from fusefs.browse.browser import Browser
from fusefs.browse.command_app import OtherCommands
from tests.support.make_trees import make_tree, owned
from tests.support.other_users import as_user
from tests.support.store_verbs import place
from tests.support.trashd_command import TRASHD, done_well, swapped

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

    async def finish(self) -> None:
        """Wait until nothing is being changed any more."""
        app = self._pilot.app
        assert isinstance(app, Browser)
        await self.until(lambda: not app.commands.doing())

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


pytestmark = pytest.mark.needs("root")

USER = 65_534
HOSTILE = [
    b"new\nline", b"\x1b[31mred\x1b]0;title\x07", b"[red]x[]", b"[@click=app.quit]", b"\xff\xfe",
    "\u202eexe.gpj".encode(), b"x" * 255, "日本語".encode(), b"-rf", b" ",
]  # fmt: skip
SEEN = [
    r"new\x0aline", r"\x1b[31mred\x1b]0;title\x07", "[red]x[]", "[@click=app.quit]", r"\xff\xfe",
    r"\xe2\x80\xaeexe.gpj", "xxx…xxx", "日本語", "-rf",
]  # fmt: skip


def ids(volume: Path) -> list[str]:
    """Of the orphans that there are."""
    return [told["id"] for told in done_well("list", "--json", "--volume", volume).objects()]


@pytest.fixture
def job(volume: Path) -> Path:
    """Swapped: what is here is the fresh directory."""
    job = make_tree(volume / "job", {"results": {"a.csv": "content", "b.csv": ""}, "notes": ""})
    swapped(job, "--note", "[b]before the upgrade")
    return job


@pytest.mark.quick("browse")
def test_a_part_of_it_is_found_and_restored_by_keys(volume: Path, job: Path) -> None:
    async def person(screen: Reader) -> None:
        await screen.read(str(job), "23h59m", "root", "# [b]before the upgrade")
        await screen.press("enter")
        await screen.read("notes", "results/")
        await screen.press("down", "enter")
        await screen.read("a.csv", "b.csv", ": /results")
        await screen.press("r")
        await screen.read("results/a.csv", str(job))
        await screen.press("enter")
        await screen.read("restored")
        await screen.press("left")
        await screen.read("results/")

    browse(person, volume, size=(80, 24))
    assert (job / "results/a.csv").read_text() == "content"
    assert not (job / "results/b.csv").exists()
    assert len(ids(volume)) == 1


def test_what_others_take_away_and_restore_is_seen(volume: Path, job: Path) -> None:
    async def person(screen: Reader) -> None:
        await screen.read(str(job))
        done_well("rm", make_tree(volume / "late", {}))
        await screen.read(str(volume / "late"))
        done_well("restore", job)
        await screen.press("ctrl+r")
        await screen.lose(str(job))
        await screen.read("1/1")

    browse(person, volume)


def test_everybodys_are_roots_to_restore_with_their_owners_rights(volume: Path) -> None:
    home = owned(make_tree(volume / "home", {"job": {"file": ""}}), USER)
    as_user(USER, lambda: swapped(home / "job"))

    async def person(screen: Reader) -> None:
        await screen.read("nobody", str(home / "job"))
        await screen.press("r", "enter")
        await screen.read("no orphans")

    browse(person, volume)
    assert (home / "job/file").stat().st_uid == USER


def test_it_is_restored_to_another_place_that_is_typed(volume: Path, job: Path) -> None:
    async def person(screen: Reader) -> None:
        await screen.read(str(job))
        await screen.press("r")
        await screen.paste(str(volume / "elsewhere"))
        await screen.press("enter")
        await screen.read("elsewhere: restored")

    browse(person, volume)
    assert (volume / "elsewhere/notes").exists()


def test_a_file_that_was_removed_is_restored_from_within_too(volume: Path) -> None:
    (file := volume / "file").write_text("content")
    done_well("rm", file)

    async def person(screen: Reader) -> None:
        await screen.read(str(file))
        await screen.press("enter")
        await screen.read("(itself)")
        await screen.press("r", "enter")
        await screen.read("restored")

    browse(person, volume)
    assert file.read_text() == "content"


def test_what_goes_wrong_is_told_with_its_hint(volume: Path, job: Path) -> None:
    async def person(screen: Reader) -> None:
        await screen.read(str(job))
        await screen.press("r")
        await screen.paste(str(volume))
        await screen.press("enter")
        await screen.read("hint: ")
        await screen.press("enter")
        await screen.lose("hint: ")
        await screen.press("k")
        await screen.type("3")
        await screen.press("enter")
        await screen.read("write 3s, 3m")
        await screen.press("escape")
        await screen.read(str(job))

    browse(person, volume)


def test_it_is_found_as_letters_are_typed(volume: Path, job: Path) -> None:
    done_well("rm", make_tree(volume / "Other", {}))

    async def person(screen: Reader) -> None:
        await screen.read(str(job), str(volume / "Other"), "1/2")
        await screen.press("slash")
        await screen.type("oth")
        await screen.read("Find: oth", "1/1")
        assert not screen.sees(str(job))
        await screen.type("q")
        await screen.read("no matching orphans", "0/0")
        await screen.press("r", "escape")
        await screen.read("1/2", str(job))
        await screen.press("slash")
        await screen.paste("UPGRADE")
        await screen.press("enter", "k")
        await screen.read(str(job), "Keep it for how long")
        await screen.press("escape")

    browse(person, volume)


def test_they_are_put_in_other_orders(volume: Path) -> None:
    for name, size in (("a", 5000), ("b", 50_000), ("c", 500)):
        make_tree(volume / name, {"file": "x" * size})
        done_well("rm", volume / name)
    done_well("du", "--volume", volume)

    async def person(screen: Reader) -> None:
        def order() -> str:
            paths = [f"{volume}/{name}" for name in "abc"]
            return "".join(path[-1] for line in screen.lines()[3:6] for path in paths if path in line)

        await screen.read(f"{volume}/b")
        for keys, wanted in ((0, "cba"), (1, "abc"), (1, "bac"), (1, "abc"), (1, "cba"), (1, "cba")):
            await screen.press(*["o"] * keys)
            await screen.until(lambda wanted=wanted: order() == wanted)  # type: ignore[misc]

    browse(person, volume)


def test_it_is_kept_for_a_time_for_good_and_no_longer(volume: Path, job: Path) -> None:
    async def person(screen: Reader) -> None:
        await screen.read(str(job), "23h59m")
        await screen.press("k")
        await screen.type("3d")
        await screen.press("enter")
        await screen.read("2d23h")
        await screen.press("k", "enter")
        await screen.read("       kept")
        await screen.press("u", "n", "u")
        await screen.read("Release it?")
        await screen.press("y")
        await screen.read("23h59m")

    browse(person, volume)


def test_nothing_is_deleted_before_it_is_asked(volume: Path, job: Path) -> None:
    identifiers = ids(volume)

    async def person(screen: Reader) -> None:
        await screen.read(str(job))
        for answer in ("n", "escape", "enter", "q"):
            await screen.press("d")
            await screen.read("Delete it permanently?", "of unknown size")
            await screen.press(answer)
            await screen.lose("Delete it permanently?")
        assert ids(volume) == identifiers
        await screen.press("d", "y")
        await screen.read("no orphans")

    browse(person, volume)
    assert ids(volume) == []


def test_an_orphan_in_quarantine_is_not_said_to_expire(volume: Path, job: Path) -> None:
    (identifier,) = ids(volume)
    orphan = place(volume, identifier)
    orphan.rename(orphan.parents[1] / "quarantine" / identifier)

    async def person(screen: Reader) -> None:
        await screen.read(str(job), "quarantine")
        await screen.press("d")
        await screen.read("Delete it permanently?", "Its state is: quarantine.")
        await screen.press("n")

    browse(person, volume)


def test_what_it_takes_is_counted(volume: Path, job: Path) -> None:
    async def person(screen: Reader) -> None:
        await screen.read(str(job), "? root")
        await screen.press("s")
        await screen.read(f"{job} uses 4.00 KiB", "4.00 KiB root", "1 orphan, 4.00 KiB")

    browse(person, volume)


def test_names_of_all_kinds_are_shown_plainly_and_restored_by_the_byte(volume: Path) -> None:
    job, taken = make_tree(volume / "job", {}), (b"new\nline", b"\xff\xfe", b"-rf")
    for name in HOSTILE:
        os.close(os.open(os.path.join(os.fsencode(job), name), os.O_CREAT))
    swapped(job)

    async def person(screen: Reader) -> None:
        await screen.read("1/1")
        await screen.press("enter")
        await screen.read(f"1/{len(HOSTILE)}", *SEEN)
        remaining = sorted(HOSTILE)
        for name in taken:
            index = remaining.index(name)
            await screen.press("home", *["down"] * index)
            await screen.read(f"{index + 1}/{len(remaining)}")
            await screen.press("r")
            await screen.read("Target path")
            await screen.press("enter")
            remaining.remove(name)
            await screen.read(f"/{len(remaining)}")
            await screen.finish()

    browse(person, volume, size=(80, 24))
    assert set(os.listdir(os.fsencode(job))) == set(taken)


def test_a_command_that_is_just_being_started_ends_with_the_program() -> None:
    async def program() -> None:
        commands = OtherCommands(["sleep"])
        begun = asyncio.ensure_future(commands.act("sleeping", "600"))
        await asyncio.sleep(0)
        assert commands.doing() == ["sleeping"]
        await commands.end()
        assert commands.doing() == []
        with pytest.raises(asyncio.CancelledError):
            await begun

    asyncio.run(program())


def test_a_hostile_path_that_it_came_from_is_no_markup_either(volume: Path) -> None:
    for name in HOSTILE[:6]:
        (path := Path(os.fsdecode(os.path.join(os.fsencode(volume), name)))).mkdir()
        done_well("rm", "--", path)

    async def person(screen: Reader) -> None:
        await screen.read("1/6", *(f"/{seen}" for seen in SEEN[:6]))
        for _ in range(6):
            await screen.press("d", "n", "r", "escape", "k", "escape", "down")
        await screen.read("6/6", *(f"/{seen}" for seen in SEEN[:6]))

    browse(person, volume)


def test_of_a_directory_of_many_the_first_are_looked_at_and_others_found(volume: Path) -> None:
    job = make_tree(volume / "job", {})
    for number in range(6_000):
        (job / f"file-{number:05}").touch()
    swapped(job)

    async def person(screen: Reader) -> None:
        await screen.read("1/1")
        await screen.press("enter")
        await screen.read("1/5,000", "file-00000", "(first 5,000")
        await screen.press("end")
        await screen.read("5,000/5,000", "file-04999")
        await screen.press("slash")
        await screen.paste("E-05999")
        await screen.read("file-05999", "1/1")
        await screen.press("escape")
        await screen.read("/5,000")

    browse(person, volume)


def test_keys_are_answered_while_a_command_waits_and_quitting_ends_it(volume: Path, tmp_path: Path) -> None:
    waits = ("sh", "-c", f"echo $$ > {tmp_path}/pid; exec sleep 1000", "sh")

    async def person(screen: Reader) -> None:
        await screen.read("loading...")
        await screen.until((tmp_path / "pid").exists)
        await screen.press("question_mark")
        await screen.read("suspend")
        await screen.press("escape", "q")
        await screen.until(lambda: screen.code() == 0)

    browse(person, volume, trashd=waits)
    pid = int((tmp_path / "pid").read_text())
    assert not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes()


def test_who_quits_while_something_is_done_is_asked(volume: Path, job: Path) -> None:
    slow = ("sh", "-c", f'test "$1" != reap || exec sleep 1000; exec {TRASHD} "$@"', "sh")

    async def person(screen: Reader) -> None:
        await screen.read(str(job))
        await screen.press("d", "y", "q")
        await screen.read("Stop this command?", f"deleting {job}")
        await screen.press("n")
        await screen.lose("Stop this command?")
        await screen.press("ctrl+c")
        await screen.read("Stop this command?")
        await screen.press("y")
        await screen.until(lambda: screen.code() == 0)

    browse(person, volume, trashd=slow)
    assert len(ids(volume)) == 1


def test_who_leaves_while_something_is_done_does_not_stop_it(volume: Path, job: Path) -> None:
    slow = ("sh", "-c", f'test "$1" != restore || sleep 1; exec {TRASHD} "$@"', "sh")

    async def person(screen: Reader) -> None:
        await screen.read(str(job))
        await screen.press("enter")
        await screen.read("results/")
        await screen.press("r", "enter", "left")
        await screen.read("ORIGIN")
        await screen.read("notes: restored")

    browse(person, volume, trashd=slow)
    assert (job / "notes").exists()


def test_a_store_that_can_not_be_looked_at_is_told_of(volume: Path) -> None:
    async def person(screen: Reader) -> None:
        await screen.read(f"{volume}/none: not found")
        assert not screen.sees("loading")

    browse(person, volume / "none")


def test_it_says_that_there_is_nothing(volume: Path) -> None:
    async def person(screen: Reader) -> None:
        await screen.read("no orphans", "0/0")
        await screen.press("enter", "r", "k", "u", "d", "s", "o", "end", "up", "pagedown")
        await screen.read("no orphans")

    browse(person, volume)
