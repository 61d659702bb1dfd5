"""What is written beside a user's models: whose mode it has, what links lead to, and what it does not tell."""

import json
import os
import stat

import pytest
from safetensors.torch import save_file
from torch import ones

from shared_core.cli.compress import _files
from shared_core.engine.receipt import Receipt
from shared_core.files.atomic import atomic_folder, atomic_write
from shared_core.files.journal import Journal, write_object
from shared_core.files.json_yaml import parse_yaml
from shared_core.runs.command import without_secrets


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield
    os.umask(before)


def mode(path):
    return oct(stat.S_IMODE(path.stat().st_mode))


def test_files_and_folders_have_the_mode_of_the_user_or_of_what_they_replace(tmp_path, umask):
    for _ in range(2):
        with atomic_write(tmp_path / "file") as temporary:
            temporary.write_text("a")
        assert mode(tmp_path / "file") == "0o640"
    (tmp_path / "file").chmod(0o604)
    with atomic_write(tmp_path / "file") as temporary:
        temporary.write_text("b")
    assert mode(tmp_path / "file") == "0o604"
    with atomic_folder(tmp_path / "new") as folder:
        save_file({"w": ones(1)}, folder / "w.safetensors")
    assert mode(tmp_path / "new") == "0o750"
    assert mode(tmp_path / "new" / "w.safetensors") == "0o640"  # safetensors' own is 0o600
    with atomic_write(tmp_path / "alone.safetensors") as temporary:
        save_file({"w": ones(1)}, temporary)
    assert mode(tmp_path / "alone.safetensors") == "0o640"
    (tmp_path / "empty").mkdir(mode=0o700)
    with atomic_folder(tmp_path / "empty") as folder:
        (folder / "a").write_text("a")
    assert mode(tmp_path / "empty") == "0o700"


def test_a_link_stays_one_and_what_it_leads_to_is_written(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "file")
    for text in ("made", "replaced"):
        with atomic_write(tmp_path / "link") as temporary:
            temporary.write_text(text)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "disk" / "file").read_text() == text


def test_a_journal_is_for_its_owner_and_holds_no_secrets(tmp_path):
    secrets = ["hf_abc", "x", "y", "1234"]

    def words(token, password, key, number):
        options = ["--hub_token", token, f"--password={password}", f"API_KEY={key}", "--tokenizer", "t"]
        return ["python", "train.py", *options, "--pass_key_password", number, "--max_tokens", "9"]

    def journal(command):
        return Journal(file, "lottery", "search", {"command": without_secrets(command)}, own="round-*")

    file = tmp_path / "search" / "lottery.json"
    file.parent.mkdir()
    journal(words(*secrets)).write()
    assert mode(file) == "0o600"
    assert json.loads(file.read_text())["command"] == words(*["***"] * 4)
    journal(words("hf_other", *secrets[1:])).read()
    file.chmod(0o644)
    write_object(file, {}, private=True)
    assert mode(file) == "0o600"


def test_what_a_terminal_would_obey_is_left_out_of_a_receipt():
    values = {"steps": {"applied": 1, "skipped": 0}, "techniques": {"prune": {"criterion": "\x1b]0;title\x07"}},
              "seconds": {}, "notes": ["\x1b[2Jcleared", "\x9b31m", "<script>"]}  # fmt: skip
    receipt = Receipt(values)
    for text in (receipt.text(), receipt._repr_html_()):
        assert "cleared" in text
        assert not [
            character for character in text if (ord(character) < 32 and character != "\n") or 126 < ord(character) < 160
        ]
    assert "<script>" not in receipt._repr_html_()


def test_compress_takes_no_files_from_outside_the_folder(tmp_path, capsys):
    model, outside = tmp_path / "model", tmp_path / "secret.json"
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "1"
    for folder in (model, blobs, snapshot):
        folder.mkdir(parents=True)
    outside.write_text("secret")
    (model / "config.json").symlink_to(outside)
    (model / "vocab.txt").write_text("a")
    assert _files(model) == {"vocab.txt": b"a"}
    assert "config.json" in capsys.readouterr().err
    (blobs / "abc").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    assert _files(snapshot) == {"config.json": b"{}"}


def test_yaml_has_no_numbers_in_base_60():
    assert parse_yaml("a: 2:4\nb: 1:30.5\nc: 12\nd: -1.5e+3\ne: 0x1F") == {
        "a": "2:4", "b": "1:30.5", "c": 12, "d": -1500.0, "e": 31,
    }  # fmt: skip
    long = "1" + ":1" * 200_000
    assert parse_yaml(f"a: {long}") == {"a": long}
