"""The mini model's table, with small streaming servers in place of vLLM."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tandem.errors import ServerError, UsageError
from tandem_evals import mini_table
from tandem_evals.mini_table import Variant, table_json, table_markdown

REPOSITORY = Path(__file__).resolve().parents[2]
SERVER = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from tests.evals import stream_server
right = {"q1": "#### 1", "q2": "Answer: B", "q3": "key 333"}
def script(_, body):
    question = body["messages"][0]["content"]
    wrong = sys.argv[3] == "vq" and question == "q1"
    return stream_server.Answer((" ", "", 1), ("#### 5" if wrong else right[question], "", 2))
with stream_server.serve(script, {"/health": {}}, port=int(sys.argv[2])):
    threading.Event().wait()
"""


@pytest.fixture
def variants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Variant]:
    heldout = tmp_path / "heldout"
    heldout.mkdir()
    answers = {"word": ("q1", "#### 1"), "choice": ("q2", "B"), "passkey": ("q3", "333")}
    for name, (question, answer) in answers.items():
        rows = [{"id": f"{name}-{i}", "question": question, "answer": answer} for i in range(4)]
        (heldout / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(mini_table, "HELDOUT", heldout)
    monkeypatch.setenv("TANDEM_STATE_DIR", str(tmp_path / "state"))

    def variant(name: str) -> Variant:
        argv = [sys.executable, "-c", SERVER, str(REPOSITORY)]
        return Variant(name, f"row {name}", lambda port: [*argv, str(port), name], {})

    wanted = [variant("stock"), variant("vq")]
    monkeypatch.setattr(mini_table, "mini_variants", lambda _model: wanted)
    return wanted


def test_rows_pairs_and_resumption(tmp_path: Path, variants: list[Variant]) -> None:
    told: list[str] = []
    out = tmp_path / "out"
    rows = mini_table.mini_table(out, limit=2, boot_timeout_s=60, model=None, tell=told.append)
    assert [row.label for row in rows] == ["row stock", "row vq"]
    assert {name: value.accuracy.value for name, value in rows[1].scores.items()} == {
        "mini-word": 0.0,
        "mini-choice": 1.0,
        "mini-passkey": 1.0,
    }
    assert rows[0].scores["mini-word"].accuracy.value == 1.0
    assert rows[1].against_baseline["mini-word"][:3] == (2, 2, 0) and not rows[0].against_baseline
    text = (out / "table.md").read_text()
    assert text == table_markdown(rows) and "| row vq | 0.0 % [0.0, 65.8] of 2 |" in text
    assert "| row vq | lost 2, won 0 of 2 (p 0.5) |" in text
    assert json.loads((out / "table.json").read_text()) == json.loads(json.dumps(table_json(rows)))
    assert sum("starting a server" in line for line in told) == len(variants)

    told.clear()
    again = mini_table.mini_table(out, limit=2, boot_timeout_s=60, model=None, tell=told.append)
    assert again == rows and told == []  # nothing was booted


def test_a_server_that_does_not_boot(tmp_path: Path, variants: list[Variant]) -> None:
    variants[1] = Variant("vq", "row vq", lambda _port: [sys.executable, "-c", "raise ValueError('bad codes')"], {})
    with pytest.raises(ServerError, match="row vq: crashed: exit code 1: ValueError: bad codes"):
        mini_table.mini_table(tmp_path / "out", limit=1, boot_timeout_s=60, model=None, tell=lambda _line: None)
    assert (tmp_path / "out" / "stock" / "mini-word" / "requests.jsonl").exists()  # the first row is kept


@pytest.mark.parametrize(
    ("config", "expected"), [({"num_experts": 16}, 4), ({"n_routed_experts": 8}, 2), ({"num_experts": 6}, 1)]
)
def test_a_quarter_of_the_experts(config: dict[str, int], expected: int) -> None:
    assert mini_table.quarter_of_experts(config) == expected


def test_a_dense_checkpoint_is_refused() -> None:
    with pytest.raises(UsageError, match="not a Mixture-of-Experts checkpoint"):
        mini_table.quarter_of_experts({"hidden_size": 64})
