"""Every decode loop of the study computes what the code's own decoder says, on every instruction set of this CPU."""

from __future__ import annotations

import math

import pytest

from studies.codec import speed
from studies.codec.layouts import LOOPS, Loop
from studies.codec.native import supported
from tandem.errors import CheckError

CASES = [(loop, isa) for loop in LOOPS for isa in loop.isas if supported(speed.SETS[isa])]


@pytest.mark.parametrize(("loop", "isa"), CASES, ids=lambda value: getattr(value, "source", value))
def test_a_loop_is_right(loop: Loop, isa: str) -> None:
    prepared = speed.Prepared(loop, isa)
    prepared.run(1)
    assert prepared.error() < speed.TOLERANCE


@pytest.mark.skipif(not CASES, reason="no loop for this CPU")
def test_a_result_with_a_nan_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed.Prepared, "error", lambda _: math.nan)
    with pytest.raises(CheckError, match="off by relative RMS"):
        speed._measure(*CASES[0])
