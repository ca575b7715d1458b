"""python -m tests.renaming.apply MAP.toml [--dry-run]: the working tree under the map, or all reasons why not.

Commit before: what was applied is looked at and taken back with git. `ruff` sorts and formats at the end.
"""

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from tests.renaming.plan import Edit, Map, Project, Refused, apply_edits, path_of, read_map, tracked
from tests.renaming.prose import Index, Words, Writer, index, left_over
from tests.renaming.scopes import Done, Job, edit_code

_N_PROCESSES = min(4, os.cpu_count() or 1)
_MEMBERS = Path(__file__).with_name("members.py")


class Change(NamedTuple):
    """What became of one file."""

    path: str
    text: bytes
    n_code: int
    n_text: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """All changes, none of them written yet."""

    names: Map
    project: Project
    changes: list[Change]
    notes: list[str]


def work_out(root: Path, wanted: Map) -> Outcome:
    """Raises  Refused with every reason that was found"""
    project = Project.of(tracked(root))
    names = project.expand(wanted)
    sources = {path: (root / path).read_bytes() for path in project.paths}
    with _Members(root, project, names) as members, multiprocessing.Pool(_N_PROCESSES) as pool:
        python = [(module, sources[path]) for module, path in project.modules.items()]
        indexes = pool.starmap(index, python, chunksize=16)
        _check_names(names, indexes)
        jobs = _jobs(project, names, sources)
        done = dict(zip((job.path for job in jobs), pool.map(edit_code, jobs, chunksize=4), strict=True))
        answer = members.answer()
    words = Words.of(names, project, indexes)
    refusals = [*answer["refusals"], *(reason for one in done.values() for reason in one.refusals)]
    changes = []
    own = {project.modules[one.module]: one for one in indexes}
    for path, source in sources.items():
        code = [*done.get(path, Done([], [])).edits, *(Edit(*edit) for edit in answer["edits"].get(path, []))]
        try:
            change = _change(path, source, code, Writer(words, path, own.get(path)), is_python=path in own)
        except Refused as refused:
            refusals += [f"{path}: {reason}" for reason in refused.args]
            continue
        if change.text != source:
            changes.append(change)
    if refusals:
        raise Refused(*dict.fromkeys(refusals))
    return Outcome(names, project, changes, [*answer["notes"], *_cautions(project, names, sources)])


def _change(path: str, source: bytes, code: list[Edit], writer: Writer, *, is_python: bool) -> Change:
    try:
        texts = writer.edits_of_python(source) if is_python else writer.edits_of_document(source.decode())
    except UnicodeDecodeError:
        texts = []
    texts = [edit for edit in texts if all(edit.end <= other.start or other.end <= edit.start for other in code)]
    return Change(path, apply_edits(source, [*code, *texts]), len(set(code)), len(texts))


def _check_names(names: Map, indexes: Iterable[Index]) -> None:
    known = {one.module: one for one in indexes}
    wrong = []
    for module, renamed in names.names.items():
        for old, new in names.top_names(module).items():
            if old not in known[module].tops:
                wrong.append(f"{module} has no {old}")
            if new in known[module].tops and new not in renamed:
                wrong.append(f"{module} has both {old} and {new}")
    if wrong:
        raise Refused(*wrong)


def _jobs(project: Project, names: Map, sources: dict[str, bytes]) -> list[Job]:
    """The files in which a renamed word occurs at all."""
    words = {module.rpartition(".")[2] for module in names.modules}
    words |= {old for module in names.names for old in names.top_names(module)}
    modules = frozenset(project.modules)
    jobs = []
    for module, path in project.modules.items():
        here = words | set(names.identifiers_in(path))
        pattern = re.compile(rb"\b(?:" + "|".join(map(re.escape, sorted(here))).encode() + rb")\b")
        if here and pattern.search(sources[path]):
            jobs.append(Job(path, module, sources[path], names, modules))
    return sorted(jobs, key=lambda job: -len(job.source))


class _Members:
    """mypy's part, which runs meanwhile."""

    def __init__(self, root: Path, project: Project, names: Map) -> None:
        classes = [f"{m}.{old}" for m in names.names for old in names.top_names(m) if old[:1].isupper()]
        self._asked = {"files": list(project.modules.values()), "members": names.members(), "classes": classes}
        self._is_asked = bool(classes or names.members())
        self._root = root

    def __enter__(self) -> Self:
        if self._is_asked:
            command = [sys.executable, str(_MEMBERS)]
            self._process = subprocess.Popen(
                command, cwd=self._root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            assert self._process.stdin is not None
            json.dump(self._asked, self._process.stdin)
            self._process.stdin.close()
        return self

    def answer(self) -> dict[str, Any]:
        if not self._is_asked:
            return {"edits": {}, "refusals": [], "notes": []}
        assert self._process.stdout is not None
        text = self._process.stdout.read()
        if self._process.wait():
            raise Refused("mypy's part ended with an error, told above")
        found: dict[str, Any] = json.loads(text)
        return found

    def __exit__(self, *_: object) -> None:
        if self._is_asked:
            self._process.kill()
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()


def _cautions(project: Project, names: Map, sources: dict[str, bytes]) -> list[str]:
    found = []
    for module in names.modules:
        path = project.modules[module]
        told = (rb"(?<!\.)__file__", rb"(?<!\.)__name__(?! ==)", rb"(?<!\.)__package__")
        words = (match.group().decode() for word in told if (match := re.search(word, sources[path])))
        found += [f"{path} moves and uses {word}" for word in words]
    return found


def write(root: Path, outcome: Outcome) -> None:
    """Changes the working tree and git's index of moved files."""
    names, project = outcome.names, outcome.project
    for change in outcome.changes:
        (root / change.path).write_bytes(change.text)
    for package, docstring in names.packages.items():
        init = root / path_of(package, is_package=True)
        if docstring and not init.exists():
            init.parent.mkdir(parents=True, exist_ok=True)
            init.write_text(f'"""{docstring}"""\n', encoding="utf-8")
            _git(root, "add", str(init))
    waiting = {
        project.modules[old]: path_of(new, is_package=old in project.packages) for old, new in names.modules.items()
    }
    while waiting:
        free = [old for old, new in waiting.items() if new not in waiting]
        if not free:
            old = next(iter(waiting))
            _move(root, old, f"{old}.moving")
            waiting[f"{old}.moving"] = waiting.pop(old)
        for old in free:
            _move(root, old, waiting.pop(old))
    for package, docstring in names.packages.items():
        if not docstring:
            _git(root, "rm", "-q", "-f", path_of(package, is_package=True))
    tidy(root, outcome)


def tidy(root: Path, outcome: Outcome) -> None:
    """Sorts imports and formats what changed, as `make fmt` does."""
    moved = {old: path_of(outcome.names.moved(module), is_package=module in outcome.project.packages)
             for module, old in outcome.project.modules.items()}  # fmt: skip
    python = [moved[change.path] for change in outcome.changes if change.path in moved]
    python = [path for path in python if (root / path).exists()]
    for command in (["check", "--select", "I", "--fix-only", "-q"], ["format", "-q"]):
        if python:
            subprocess.run([sys.executable, "-m", "ruff", *command, *python], cwd=root, check=False)


def _move(root: Path, old: str, new: str) -> None:
    (root / new).parent.mkdir(parents=True, exist_ok=True)
    _git(root, "mv", old, new)


def _git(root: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=root, check=True)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("map", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    begun, root = time.monotonic(), Path.cwd()
    try:
        outcome = work_out(root, read_map(options.map))
    except Refused as refused:
        print(*(f"refused: {reason}" for reason in refused.args), sep="\n")
        return 1
    if not options.dry_run:
        write(root, outcome)
        after = Project.of(tracked(root))
        told = [line for path in after.paths for line in _left(root, outcome, path)]
        print(*(f"left: {line}" for line in told), sep="\n", end="\n" if told else "")
    print(*(f"note: {note}" for note in outcome.notes), sep="\n", end="\n" if outcome.notes else "")
    n_code, n_text = sum(c.n_code for c in outcome.changes), sum(c.n_text for c in outcome.changes)
    print(
        f"{len(outcome.names.modules)} modules move, {len(outcome.changes)} files change: {n_code} places in code, "
        f"{n_text} in text; {time.monotonic() - begun:.0f} s"
    )
    return 0


def _left(root: Path, outcome: Outcome, path: str) -> list[str]:
    try:
        text = (root / path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return []
    return list(left_over(outcome.names, outcome.project, path, text))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
