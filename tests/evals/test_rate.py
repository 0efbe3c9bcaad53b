"""The rate counts tokens, never chunks, and only what was measured."""

from __future__ import annotations

import pytest

from tandem_evals.rate import decode_rate, measured, summarise

from .builders import record


def test_rate_is_tokens_after_the_first_over_their_time() -> None:
    rate = decode_rate([record(11, [100.0] * 10), record(21, [50.0] * 20)])
    assert rate is not None
    assert rate.tok_s == pytest.approx(30 / 2.0)  # 10 tokens in 1 s, 20 in 1 s: not the mean of the two rates
    assert (rate.n, rate.tokens) == (2, 30)
    assert rate.lo == pytest.approx(10) and rate.hi == pytest.approx(20)


def test_chunks_of_several_tokens() -> None:
    one_each, several = record(13, [10.0] * 12), record(13, [40.0] * 3, chunk_tokens=(1, 4, 4, 4))
    assert decode_rate([one_each]) == decode_rate([several])


def test_replies_of_one_token_contribute_nothing() -> None:
    long, short, empty = record(11, [100.0] * 10), record(1, []), record(0, [], t_first_ns=None, t_last_ns=None)
    assert decode_rate([long, short, empty]) == decode_rate([long])
    assert decode_rate([short, empty]) is None


def test_only_measured_answers_count() -> None:
    good = record(11, [100.0] * 10)
    others = [
        record(11, [1.0] * 10, phase="warmup"),
        record(11, [1.0] * 10, phase="rejected"),
        record(11, [1.0] * 10, outcome="error", error="HTTP 500"),
    ]
    assert measured([good, *others]) == [good]
    assert decode_rate([good, *others]) == decode_rate([good])


def test_summary_counts_truncated_replies_and_takes_the_median_ttft() -> None:
    late = record(3, [1.0] * 2, t_send_ns=0, finish="length", outcome="truncated")
    summary = summarise([record(3, [1.0] * 2), record(3, [1.0] * 2), late])
    assert summary.truncated == 1 and summary.measured == 3
    assert summary.ttft_median_ms == pytest.approx(50)


def test_interval_is_the_same_every_time_and_narrows() -> None:
    few = [record(11, [100.0 + i] * 10) for i in range(5)]
    assert decode_rate(few) == decode_rate(few)
    wide, narrow = decode_rate(few), decode_rate(few * 20)
    assert wide is not None and narrow is not None
    assert narrow.hi - narrow.lo < wide.hi - wide.lo
    assert wide.lo < wide.tok_s < wide.hi
