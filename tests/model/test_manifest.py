"""The manifest of a folder: every changed bit is found, and nothing that is not a manifest passes for one."""

import hashlib

import pytest

from whetstone.model import manifest
from whetstone.model.manifest import Damage, check_sizes, damaged_files, read_manifest, write_manifest


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "PIECE", 1000)
    folder = tmp_path / "checkpoint-7"
    (folder / "state").mkdir(parents=True)
    (folder / "weights").write_bytes(bytes(range(256)) * 20)  # six pieces
    (folder / "state" / "part").write_bytes(b"x" * 1000)  # one, exactly
    (folder / "empty").write_bytes(b"")
    write_manifest(folder, step=7, seconds=1.5)
    return folder


def test_a_small_file_has_the_digest_that_sha256sum_prints(folder):
    found = read_manifest(folder)
    assert found.step == 7 and found.seconds == 1.5 and found.num_bytes == 6120
    assert found.files["state/part"].sha256 == (hashlib.sha256(b"x" * 1000).hexdigest(),)
    assert len(found.files["weights"].sha256 or ()) == 6
    assert damaged_files(folder, found) == []


@pytest.mark.parametrize("place", [0, 999, 1000, 2500, 5119])
def test_one_flipped_bit_is_found_by_the_part_that_looks_at_it(folder, place):
    data = bytearray((folder / "weights").read_bytes())
    data[place] ^= 1
    (folder / "weights").write_bytes(bytes(data))
    found = read_manifest(folder)
    check_sizes(folder, found)  # which it does not change
    assert damaged_files(folder, found) == ["weights"]
    parts = [damaged_files(folder, found, part=part, num_parts=3) for part in range(3)]
    assert sorted(len(part) for part in parts) == [0, 0, 1]
    assert damaged_files(folder, found, skip="state") == ["weights"]


def test_files_that_are_gone_or_have_another_size(folder):
    found = read_manifest(folder)
    (folder / "state" / "part").write_bytes(b"x" * 999)
    with pytest.raises(Damage, match="state/part"):
        check_sizes(folder, found)
    (folder / "state" / "part").unlink()
    with pytest.raises(Damage, match="state/part"):
        check_sizes(folder, found)
    assert damaged_files(folder, found) == ["state/part"]


def test_a_manifest_belongs_to_its_step(folder):
    other = folder.with_name("checkpoint-8")
    folder.rename(other)
    with pytest.raises(Damage, match="step 7"):
        read_manifest(other)
    elsewhere = folder.with_name("copy")
    other.rename(elsewhere)
    assert read_manifest(elsewhere).step == 7  # a name of the user's own says nothing of a step


def test_every_changed_bit_of_a_manifest_is_found(folder):
    path = folder / "whetstone.json"
    text = path.read_bytes()
    unseen = []
    for place in range(len(text)):
        path.write_bytes(text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :])
        try:
            read_manifest(folder)
        except Damage:
            continue
        unseen.append(text[place : place + 1])
    assert unseen == []


JUNK = ["", "{}", "[]", "null", "3", "true", '"x"', "{", '{"step": 7}', '{"step": 7, "files": {}}']
JUNK += ['{"step": 7, "files": []}', '{"step": -1, "files": {"a": 1}}', '{"step": true, "files": {"a": 1}}']
JUNK += [
    '{"step": 7, "files": {"a": -1}}',
    '{"step": 7, "files": {"a": "1"}}',
    '{"step": 7.0, "files": {"a": 1}}',
]
JUNK += ['{"step": 7, "files": {"../a": 1}}', '{"step": 7, "files": {"/etc/passwd": 1}}']
JUNK += ['{"step": 7, "files": {"a": {"size": 1, "sha256": []}}}', '{"step": 7, "files": {"a": {"size": 1}}}']
JUNK += [
    '{"step": 7, "files": {"a": {"size": 1, "sha256": ["00"]}}}',
    "[" * 100_000,
    '{"step": 1' + "0" * 5000 + "}",
]


@pytest.mark.parametrize("text", JUNK)
def test_what_is_no_manifest_is_refused(folder, text):
    (folder / "whetstone.json").write_text(text)
    with pytest.raises(Damage, match=r"whetstone\.json"):
        read_manifest(folder)
