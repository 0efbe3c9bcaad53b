"""Made-up records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tandem_evals.records import RequestRecord

MS = 1_000_000


def record(tokens: int = 10, gaps_ms: Sequence[float] = (), **fields: Any) -> RequestRecord:
    """A reply of `tokens` tokens that came in 1 + len(gaps_ms) chunks, 50 ms after the question was sent."""
    deltas = tuple(round(gap * MS) for gap in gaps_ms)
    first = 1_050 * MS
    values: dict[str, Any] = {
        "index": 0,
        "item": "item-0",
        "epoch": 0,
        "boot": 0,
        "phase": "measured",
        "t_send_ns": 1_000 * MS,
        "t_first_ns": first,
        "t_last_ns": first + sum(deltas),
        "chunk_ns": (0, *deltas),
        "chunk_tokens": (),
        "prompt_tokens": 5,
        "completion_tokens": tokens,
        "finish": "stop",
        "content": "#### 1",
        "reasoning": "",
        "answer": "1",
        "outcome": "correct",
        "error": None,
        "attempts": 1,
        "seed": 0,
        "params": {"temperature": 0.0, "max_tokens": 16},
        "counters": {},
    }
    return RequestRecord(**{**values, **fields})
