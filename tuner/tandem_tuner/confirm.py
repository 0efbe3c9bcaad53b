"""Who wins, and how sure that is: the challenger against the default settings. Pure.

The challenger is the fastest valid trial. Its trial was picked because it was fast, so only its fresh confirmation
boot is compared; all boots of the default count, because nothing picked them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from tandem_evals.rate import Rate
from tandem_tuner.estimate import Ratio, estimate, rate_tok_s, ratio
from tandem_tuner.gate import Paired, non_inferior, paired
from tandem_tuner.propose import best, may_win
from tandem_tuner.records import BootRecord, Sample, pooled, settled
from tandem_tuner.space import Knobs

Result = Literal["wins", "tie", "slower", "quality", "only_default", "no_default"]


class Verdict(NamedTuple):
    """What the study found."""

    result: Result
    winner: Knobs
    challenger: Knobs | None  # the fastest valid settings other than the default
    estimate: Rate
    vs_default: Ratio | None  # challenger over default
    repeat_spread: float | None  # largest change of the default's rate from boot to boot, a share
    quality: Paired | None  # challenger against default, on the questions both were asked
    confirmed: bool  # the winner was measured again, on a fresh boot
    boots: int  # that the estimate comes from
    samples: tuple[Sample, ...]
    line: str  # for a person


def challenger(default: Knobs, records: Sequence[BootRecord]) -> Knobs | None:
    """The fastest valid trial that is not the default and whose confirmation has not failed."""
    ended = settled(tuple(records))
    search = tuple(record for record in ended if record.phase == "search")
    failed = {Knobs.of(record.settings) for record in ended if record.phase == "confirm" and not record.ok}
    alone = not any(record.ok and Knobs.of(record.settings) == default for record in search)
    able = [
        record
        for record in search
        if (knobs := Knobs.of(record.settings)) != default
        and knobs not in failed
        and (alone or may_win(knobs, default, search))
    ]
    fastest = best(able)
    return Knobs.of(fastest.settings) if fastest else None


def pending(default: Knobs, records: Sequence[BootRecord]) -> tuple[Knobs, ...]:
    """The settings that still want a confirmation boot, in order: the challenger, then the default."""
    ended = settled(tuple(records))
    tried = {Knobs.of(record.settings) for record in ended if record.phase == "confirm"}
    default_ok = any(record.ok and Knobs.of(record.settings) == default for record in ended)
    rival = challenger(default, records)
    wanted = [rival if rival and _faster(rival, default, ended) else None, default if default_ok else None]
    return tuple(knobs for knobs in wanted if knobs is not None and knobs not in tried)


def decide(default: Knobs, records: Sequence[BootRecord]) -> Verdict | None:
    """The verdict on what is recorded so far; None without one valid trial."""
    ended = [record for record in settled(tuple(records)) if record.ok and rate_tok_s(record.measured) is not None]
    rival = challenger(default, records)
    default_boots = tuple(record for record in ended if Knobs.of(record.settings) == default)
    rival_boots = tuple(record for record in ended if Knobs.of(record.settings) == rival)
    fresh = tuple(record for record in rival_boots if record.phase == "confirm")
    if not default_boots and not rival_boots:
        return None
    compared = fresh or rival_boots
    spread = _spread(default_boots)
    if rival is None:
        line = "the default settings: no other settings gave a valid trial that may win"
        return _verdict("only_default", default, default_boots, spread, line)
    if not default_boots:
        line = f"{rival}: the default settings gave no valid trial, so neither speed nor answers could be compared"
        return _verdict("no_default", rival, compared, spread, line, rival)
    over = ratio(pooled(compared), pooled(default_boots))
    assert over is not None  # both have a rate
    answers = paired(pooled(compared), pooled(default_boots))
    gain = f"{100 * (over.value - 1):+.1f} % [{100 * (over.lo - 1):+.1f}, {100 * (over.hi - 1):+.1f}]"
    if over.hi < 1:
        line = f"the default settings are the fastest: the next ({rival}) is at {gain}"
        return _verdict("slower", default, default_boots, spread, line, rival, over, answers)
    if over.lo <= 1 or over.value - 1 <= (spread or 0.0):
        moved = f"two boots of the default differ by {100 * (spread or 0):.1f} %"
        why = "the interval holds zero" if over.lo <= 1 else moved
        line = f"tie -> the default settings ({rival} is at {gain}; {why})"
        return _verdict("tie", default, default_boots, spread, line, rival, over, answers)
    if rival.fp4_top < default.fp4_top and not non_inferior(answers):
        line = (
            f"the default settings: {rival} is at {gain}, but on {answers.n} shared questions ({answers.lost} lost, "
            f"{answers.won} won) a loss of {-100 * answers.lower:.1f} points of accuracy cannot be ruled out"
        )
        return _verdict("quality", default, default_boots, spread, line, rival, over, answers)
    line = f"{rival} wins by {gain} over the default settings"
    return _verdict("wins", rival, compared, spread, line, rival, over, answers)


def _verdict(
    result: Result,
    winner: Knobs,
    boots: tuple[BootRecord, ...],
    spread: float | None,
    line: str,
    rival: Knobs | None = None,
    over: Ratio | None = None,
    answers: Paired | None = None,
) -> Verdict:
    samples = pooled(boots)
    value = estimate(samples)
    assert value is not None  # every boot here has a rate
    confirmed = any(record.phase == "confirm" for record in boots)
    return Verdict(result, winner, rival, value, over, spread, answers, confirmed, len(boots), samples, line)


def _faster(ours: Knobs, theirs: Knobs, records: Sequence[BootRecord]) -> bool:
    """In the search; true where one of them has no valid trial."""
    rates = {
        Knobs.of(record.settings): rate_tok_s(record.measured)
        for record in records
        if record.ok and record.phase == "search"
    }
    first, second = rates.get(ours), rates.get(theirs)
    return first is None or second is None or first > second


def _spread(boots: Sequence[BootRecord]) -> float | None:
    rates = [rate for record in boots if (rate := rate_tok_s(record.measured)) is not None]
    return max(rates) / min(rates) - 1 if len(rates) > 1 else None
