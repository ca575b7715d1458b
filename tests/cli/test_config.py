"""trashd config: says what is wrong with file, key and fix; shows what is in force, and where it comes from."""

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from fusefs.cli.main import run
from fusefs.core.config import Config
from fusefs.linux.config_files import check_files, default_config, load_system_config
from tests.support.golden_files import compare
from tests.support.other_users import as_user
from tests.support.trashd_command import CommandResult, trashd


@pytest.fixture
def etc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that this process takes for the configuration's."""
    directory = tmp_path / "trashd"
    directory.mkdir()
    monkeypatch.setattr("fusefs.linux.config_files.SYSTEM_DIR", bytes(directory))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return directory


def write(path: Path, text: str) -> Path:
    """A file as an administrator makes it."""
    path.write_text(text, encoding="utf-8")
    path.chmod(0o644)
    return path


def check(draft: Path, *options: str) -> CommandResult:
    """`trashd config check DRAFT`."""
    return trashd("config", "check", *options, draft)


def test_right_file_is_said_to_be(tmp_path: Path) -> None:
    draft = write(tmp_path / "draft.toml", 'poll = "1m"')
    assert check(draft) == CommandResult(0, f"{draft}: no problems\n", "")


def test_wrong_file_is_told_with_key_and_fix_and_exit_code_2(tmp_path: Path) -> None:
    draft = write(tmp_path / "draft.toml", '[defaults]\nretension = "24h"\n')
    assert check(draft) == CommandResult(
        2, f"{draft}: defaults.retension: unknown key\n  fix: did you mean retention?\n", ""
    )


@pytest.mark.parametrize(
    ("text", "key", "what"),
    [
        (
            '[defaults]\ndelete_as = "root"\nusers = ["no-such-user", "12001", "root"]',
            "defaults.users",
            "no such user: no-such-user",
        ),
        ('[hooks]\nuser = "no-such-user"', "hooks.user", "no such user: no-such-user"),
        ('[hooks]\n\non_swap = ["/no/such/program"]', "hooks.on_swap", "/no/such/program can't be executed"),
        ('[hooks]\n\non_swap = ["/etc/passwd"]', "hooks.on_swap", "/etc/passwd can't be executed"),
        ('[hooks]\n\non_swap = ["/etc"]', "hooks.on_swap", "/etc can't be executed"),
    ],
)
def test_what_this_machine_does_not_have_is_told(tmp_path: Path, text: str, key: str, what: str) -> None:
    draft = write(tmp_path / "draft.toml", text)
    (problem,) = check(draft, "--json").objects()
    assert (problem["key"], problem["what"]) == (key, what)


def test_without_files_the_defaults_are_said_to_be_in_force(etc: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "check"]) == 0
    assert str(etc) in capsys.readouterr().out


@pytest.mark.quick("config")
def test_shown_configuration_reads_back(etc: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        '[defaults]\nretention = "2d"\n[[volume]]\npath = "/v"\nquota.share = "5%"\n[[volume.rules]]\npath = "/v/a"\n'
    )
    file = write(etc / "config.toml", text)
    assert run(["config", "show"]) == 0
    shown = capsys.readouterr().out
    assert check_files([bytes(write(tmp_path / "shown.toml", shown))]).config == check_files([bytes(file)]).config
    assert f'retention = "2d"  # {file}' in shown
    assert f'quota.share = "5%"  # {file}' in shown


def test_shown_for_a_path_are_the_rules_that_decide(etc: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(etc / "config.toml", '[[volume]]\npath = "/"\n[[volume.rules]]\npath = "/no"\nretention = "2d"\n')
    assert run(["config", "show", "/no/such/file"]) == 0
    assert f'retention = "2d"  # {file}' in capsys.readouterr().out
    assert run(["config", "show", "/nowhere"]) == 0
    shown = capsys.readouterr()
    assert 'retention = "1d"\n' in shown.out
    assert "/nowhere: does not exist; these are the settings for /" in shown.err


def test_shown_for_programs_is_the_same_in_units(etc: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(etc / "config.toml", '[[volume]]\npath = "/"\nretention = "2d"\n')
    assert run(["config", "show", "--json", "/nowhere"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["path"], shown["rules"]["retention_s"]) == ("/", 2 * 86_400)
    assert run(["config", "show", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["volumes"][0]["rules"]["retention_s"] == 2 * 86_400


def test_volume_that_is_named_is_one_even_within_a_filesystem(etc: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(etc / "config.toml", '[[volume]]\npath = "/no/such"\nretention = "2d"\n')
    assert run(["config", "show", "--json", "/no/such/file"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == "/no/such"


@pytest.mark.needs("root")
def test_user_sees_what_is_in_force_for_roots_service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with TemporaryDirectory() as shown:
        write(Path(shown) / "config.toml", 'poll = "7m"\n')
        os.chmod(shown, 0o755)
        monkeypatch.setattr("fusefs.linux.config_files.SYSTEM_DIR", os.fsencode(shown))
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
        assert as_user(12001, load_system_config).config == Config(poll_s=420)


def test_wrong_configuration_is_not_shown(etc: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(etc / "config.toml", "what = 1\n")
    assert run(["config", "show"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert f"{file}: what: unknown key" in said.err


def test_defaults_differ_for_users_in_the_audit_log_alone() -> None:
    assert default_config(of_root=False)._replace(audit=Config().audit) == Config()


@pytest.mark.needs("root")
@pytest.mark.parametrize(("name", "options"), [("config-show.toml", []), ("json-config-show.json", ["--json"])])
def test_defaults_are_shown_as_promised(
    etc: Path, capsys: pytest.CaptureFixture[str], name: str, options: list[str]
) -> None:
    assert os.listdir(etc) == []
    assert run(["config", "show", *options]) == 0
    compare(name, capsys.readouterr().out)


def test_the_old_name_of_a_key_is_a_warning_that_names_the_new_one(tmp_path: Path) -> None:
    done = check(write(tmp_path / "draft.toml", '[defaults]\nauthority = "asker"\n'))
    assert done.code == 0
    assert "defaults.authority: this key is now called delete_as" in done.out
    assert 'delete_as = "owner"' in done.out
