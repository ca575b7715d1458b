"""The configuration's files: found in their order, believed only if no other user can write them."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from fusefs.core.config import Config
from fusefs.core.errors import BadConfig, ConfigProblem
from fusefs.core.toml_reader import TEXT_MAX_BYTES
from fusefs.linux.config_files import LoadedConfig, check_files, config_dir, default_config, load_config
from tests.support.other_users import as_user

USER = 12001


@pytest.fixture
def etc() -> Iterator[Path]:
    """A directory as /etc/trashd is: every user may look in."""
    with TemporaryDirectory() as path:
        os.chmod(path, 0o755)
        yield Path(path)


def write(path: Path, text: str = "") -> Path:
    """A file as an administrator makes it."""
    path.parent.mkdir(mode=0o755, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o644)
    return path


def load(etc: Path) -> LoadedConfig:
    """What is in force."""
    return load_config(bytes(etc))


def problems(act: Callable[[], LoadedConfig]) -> list[ConfigProblem]:
    """What is wrong with the files."""
    with pytest.raises(BadConfig) as caught:
        act()
    return list(caught.value.problems)


def test_without_files_the_defaults_are_in_force(etc: Path, tmp_path: Path) -> None:
    nothing = LoadedConfig(default_config(of_root=os.geteuid() == 0), (), {})
    assert load(etc) == load(tmp_path / "nowhere") == nothing


def test_drop_ins_are_read_after_the_file_sorted_by_name(etc: Path) -> None:
    write(etc / "config.toml", 'poll = "1m"')
    write(etc / "config.d/20.toml", 'poll = "2m"')
    write(etc / "config.d/10.toml", 'poll = "3m"')
    loaded = load(etc)
    assert loaded.config.poll_s == 120
    assert [os.path.basename(file) for file in loaded.files] == [b"config.toml", b"10.toml", b"20.toml"]
    assert str(loaded.settings["poll",].place) == f"{etc}/config.d/20.toml: poll"


@pytest.mark.parametrize("name", ["10.toml~", ".10.toml", "10.toml.dpkg-old", "README"])
def test_what_editors_and_packagers_leave_is_no_drop_in(etc: Path, name: str) -> None:
    write(etc / "config.d" / name, "nonsense")
    assert load(etc).files == ()


def test_problems_of_all_files_come_together(etc: Path) -> None:
    write(etc / "config.toml", "\npoll = 1")
    write(etc / "config.d/1.toml", 'poll = "1m"').chmod(0o666)
    write(etc / "config.d/2.toml", "what = 1")
    assert [(problem.file.removeprefix(f"{etc}/"), problem.key) for problem in problems(partial(load, etc))] == [
        ("config.d/1.toml", ""),
        ("config.toml", "poll"),
        ("config.d/2.toml", "what"),
    ]


@pytest.mark.parametrize("mode", [0o646, 0o602, 0o777])
def test_file_that_everybody_may_write_is_not_believed(etc: Path, mode: int) -> None:
    write(etc / "config.toml").chmod(mode)
    (problem,) = problems(partial(load, etc))
    assert "every user can write" in problem.what
    assert "chmod" in problem.fix


@pytest.mark.needs("root")
def test_file_that_a_group_may_write_is_not_believed_unless_it_is_our_own(etc: Path) -> None:
    file = write(etc / "config.toml")
    file.chmod(0o664)
    assert load(etc).files
    os.chown(file, 0, USER)
    (problem,) = problems(partial(load, etc))
    assert "its group can write" in problem.what


@pytest.mark.needs("root")
def test_file_of_somebody_else_is_not_believed(etc: Path) -> None:
    os.chown(write(etc / "config.toml"), USER, USER)
    (problem,) = problems(partial(load, etc))
    assert f"uid {USER}" in problem.what


@pytest.mark.needs("root")
@pytest.mark.parametrize("directory", ["", "config.d"])
def test_file_in_a_directory_of_somebody_else_is_not_believed(etc: Path, directory: str) -> None:
    write(etc / directory / "config.toml")
    os.chown(etc / directory, USER, USER)
    assert any(f"uid {USER}" in problem.what for problem in problems(partial(load, etc)))


@pytest.mark.needs("root")
def test_user_believes_himself_and_root(etc: Path) -> None:
    os.chown(write(etc / "config.toml"), USER, USER)
    write(etc / "config.d/1.toml")
    assert len(as_user(USER, partial(load, etc)).files) == 2


@pytest.mark.needs("root")
def test_file_that_may_not_be_read_is_told(etc: Path) -> None:
    write(etc / "config.toml").chmod(0o600)
    (problem,) = as_user(USER, partial(problems, partial(load, etc)))
    assert problem.what == "can't be read: Permission denied"
    assert "as root" in problem.fix


@pytest.mark.needs("root")
def test_user_has_no_audit_log_unless_he_says_so(etc: Path) -> None:
    assert load(etc).config.audit == Config().audit
    assert as_user(USER, partial(load, etc)).config.audit is None


def test_what_is_no_file_is_told_and_keeps_nobody_waiting(etc: Path) -> None:
    os.mkfifo(etc / "config.toml")
    (etc / "config.d").mkdir()
    (etc / "config.d/1.toml").mkdir()
    (etc / "config.d/2.toml").symlink_to("/dev/zero")
    (etc / "config.d/3.toml").symlink_to("3.toml")
    told = [problem.what for problem in problems(partial(load, etc))]
    assert told[:3] == ["not a regular file"] * 3
    assert "Too many levels of symbolic links" in told[3]


def test_huge_file_is_refused(etc: Path) -> None:
    file = write(etc / "config.toml")
    os.truncate(file, 100 * TEXT_MAX_BYTES)
    (problem,) = problems(partial(load, etc))
    assert "larger than" in problem.what


def test_name_of_a_file_moves_no_cursor(etc: Path) -> None:
    write(etc / "config.d/\x1b[2J.toml", "what = 1")
    (problem,) = problems(partial(load, etc))
    assert str(problem).isprintable()


def test_draft_is_read_whoever_may_write_it(etc: Path) -> None:
    draft = write(etc / "draft", 'poll = "1m"')
    draft.chmod(0o666)
    assert check_files([bytes(draft)]).config.poll_s == 60


def test_draft_that_is_not_there_is_a_problem(etc: Path) -> None:
    (problem,) = problems(partial(check_files, [bytes(etc / "draft")]))
    assert problem.what == "can't be read: No such file or directory"


@pytest.mark.needs("root")
def test_users_configuration_is_where_he_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/x")
    assert as_user(USER, config_dir) == b"/x/trashd"
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert as_user(USER, config_dir) == b"/home/somebody/.config/trashd"
    assert config_dir() == b"/etc/trashd"
