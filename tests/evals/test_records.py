"""Records on disk: strict, append-only, and whole after a kill."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tandem.errors import CheckError, UsageError
from tandem_evals.records import RecordWriter, latest, read_records

from .builders import record


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "requests.jsonl"
    wanted = (
        record(3, [1.5, 2.5], chunk_tokens=(1, 1, 1)),
        record(0, [], t_first_ns=None, t_last_ns=None, content="é\n"),
    )
    with RecordWriter(path) as writer:
        for one in wanted:
            writer.append(one)
        assert read_records(path).records == wanted  # each is on disk at once
    assert json.loads(path.read_text().splitlines()[0])["schema"] == "tandem/request/1"


@pytest.mark.parametrize("cut", [1, 2, 40])
def test_a_torn_last_line_is_dropped_and_said(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "requests.jsonl"
    with RecordWriter(path) as writer:
        writer.append(record(item="a"))
        writer.append(record(item="b"))
    os.truncate(path, path.stat().st_size - cut)
    torn = read_records(path)
    assert [one.item for one in torn.records] == ["a"] and torn.torn_bytes > 0
    with RecordWriter(path) as writer:
        assert writer.dropped_bytes == torn.torn_bytes
        writer.append(record(item="c"))
    again = read_records(path)
    assert [one.item for one in again.records] == ["a", "c"] and again.torn_bytes == 0


def test_damage_before_the_end_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b'{"schema": "tandem/request/1"}\n' + record().line())
    with pytest.raises(CheckError, match=r"requests\.jsonl:1: index"):
        read_records(path)


def test_an_unknown_key_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps({**json.loads(record().line()), "tok_s": 9}) + "\n")
    with pytest.raises(CheckError, match="unknown key 'tok_s'"):
        read_records(path)


def test_a_missing_file_holds_no_records(tmp_path: Path) -> None:
    assert read_records(tmp_path / "none.jsonl").records == ()


def test_two_writers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    with RecordWriter(path), pytest.raises(UsageError, match="being written by another run"):
        RecordWriter(path)


def test_the_last_record_of_an_item_counts() -> None:
    failed, fine = record(item="a", outcome="error", error="x"), record(item="a")
    assert latest([failed, fine, record(item="b")]) == {("a", 0): fine, ("b", 0): record(item="b")}
