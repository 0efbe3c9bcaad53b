"""The tuner's decisions, each a function of data: space, proposals, warm-up, budget, gate, verdict, estimate."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tandem.errors import PlanError
from tandem.outcome import Outcome as ServerOutcome
from tandem_evals.rate import decode_rate
from tandem_evals.records import RequestRecord
from tandem_tuner.budget import Costs, Limits, affords_search, announce, confirm_questions, costs, left
from tandem_tuner.confirm import challenger, decide, pending
from tandem_tuner.effects import effects
from tandem_tuner.estimate import estimate, rate_tok_s, ratio
from tandem_tuner.gate import Paired, informative, non_inferior, paired, screened_out
from tandem_tuner.propose import propose
from tandem_tuner.questions import in_spread_order
from tandem_tuner.records import BootRecord, Outcome, Sample
from tandem_tuner.report import untried_notes
from tandem_tuner.space import (
    Box,
    Knobs,
    PackageFacts,
    Slack,
    build_space,
    fp4_choices,
    pinning_choices,
    thread_choices,
)
from tandem_tuner.warmup import WarmupRule, is_stationary
from tests.tuner.builders import ALL_KNOBS, MINI, TWO_CORES, exam, record, sample, space

KEY = "k" * 64


def test_every_end_of_a_server_is_an_outcome_of_a_trial() -> None:
    assert {outcome.value for outcome in ServerOutcome} <= {outcome.value for outcome in Outcome}


def test_choices_differ_on_this_box_only() -> None:
    assert thread_choices(2, 2) == (1, 2)
    assert thread_choices(12, 2) == (1, 2, 3, 4, 6, 8, 10, 12)
    assert pinning_choices(Box(1, 1)) == ("none",)
    assert pinning_choices(Box(8, 1)) == ("none", "compact")
    assert pinning_choices(Box(8, 2)) == ("none", "compact", "spread")
    assert fp4_choices(MINI) == (0, 4, 8, 16)
    assert fp4_choices(PackageFacts(96, 30, False)) == (0, 24, 30, 48, 96)
    assert fp4_choices(PackageFacts(16, 16, True)) == (16,)


def test_only_knobs_of_the_build_are_searched() -> None:
    only = build_space(TWO_CORES, MINI, ("cpu_threads",))
    assert {knobs.fp4_top for knobs in only.feasible} == {4} and {k.pinning for k in only.feasible} == {"none"}


def test_what_does_not_fit_is_refused_with_its_bytes() -> None:
    def ram(knobs: Knobs) -> Slack:
        return Slack("RAM", (8 - knobs.fp4_top) << 30)

    over = build_space(TWO_CORES, MINI, ALL_KNOBS, (ram,))
    assert max(knobs.fp4_top for knobs in over.feasible) == 8
    assert {refused.knobs.fp4_top for refused in over.refused} == {16}
    assert all(propose(over, records, KEY).knobs.fp4_top <= 8 for records in _prefixes(over))  # type: ignore[union-attr]
    with pytest.raises(PlanError, match=r"RAM is short by 3\.00 GiB"):
        build_space(TWO_CORES, MINI, ALL_KNOBS, (lambda _: Slack("RAM", -3 << 30),))


def test_the_report_says_why_fewer_fp4_experts_were_not_tried() -> None:
    over = space()
    (note,) = untried_notes(over, [record(0, over.default, wrong=20)])
    assert "answered 0 of 20 questions right" in note and "fp4_top=4" in note
    assert untried_notes(over, [record(0, over.default, wrong=1)]) == []
    assert untried_notes(over, []) == []


def _prefixes(over: object) -> list[list[BootRecord]]:
    """What is recorded before each of the proposals of a whole search."""
    records: list[BootRecord] = []
    prefixes = []
    while (proposal := propose(over, records, KEY)) is not None:  # type: ignore[arg-type]
        prefixes.append(list(records))
        speed = 40 + 10 * proposal.knobs.cpu_threads - 0.3 * proposal.knobs.fp4_top
        records.append(record(len(records), proposal.knobs, speed, why=proposal.why))
    return prefixes


def test_the_default_then_a_contrast_a_knob_then_the_sampler() -> None:
    last = _prefixes(space())[-1]
    why = [entry.why for entry in last]
    assert why[:4] == ["default", "contrast:cpu_threads", "contrast:pinning", "contrast:fp4_top"]
    assert set(why[4:]) == {"sampler"}
    tried = [Knobs.of(entry.settings) for entry in last]
    assert len(tried) == len(set(tried)) and tried[0] == space().default
    assert tried[2].cpu_threads == 2, "a contrast starts from the best so far"


def test_a_proposal_depends_on_records_and_key_only() -> None:
    records = _prefixes(space())[6]
    first = propose(space(), records, KEY)
    interrupted = record(6, space().default, outcome=Outcome.INTERRUPTED)
    assert propose(space(), records, KEY) == first == propose(space(), [*records, interrupted], KEY)
    assert len({propose(space(), records, str(number)) for number in range(20)}) > 1


def test_a_failed_point_is_not_proposed_again_and_is_no_value() -> None:
    records = [record(0, space().default), record(1, Knobs(2, "none", 4), outcome=Outcome.OOM_HOST)]
    records[1] = records[1].model_copy(update={"why": "contrast:cpu_threads"})
    proposal = propose(space(), records, KEY)
    assert proposal is not None and proposal.knobs.cpu_threads == 1


def test_the_rate_is_that_of_tandem_evals() -> None:
    requests = [
        RequestRecord(
            index=n, item=f"q{n}", epoch=0, boot=0, phase="warmup" if n == 0 else "measured", t_send_ns=0,
            t_first_ns=10**8, t_last_ns=10**8 + 10**7 * (n + 3), chunk_ns=(), chunk_tokens=(), prompt_tokens=5,
            completion_tokens=n, finish="stop", content="", reasoning="", answer=None, outcome="correct", error=None,
            attempts=1, seed=0, params={}, counters={},
        )
        for n in range(12)
    ]  # fmt: skip
    samples = tuple(map(Sample.of, requests))
    assert estimate(samples) == decode_rate(requests)
    timed = range(2, 12)
    expected = sum(n - 1 for n in timed) / sum(0.01 * (n + 3) for n in timed)
    assert rate_tok_s(samples) == pytest.approx(expected)


def test_a_ratio_covers_the_truth() -> None:
    generator = np.random.default_rng(1)
    covered = 0
    for _ in range(40):
        ours = [sample(f"q{n}", 55 * np.exp(0.15 * generator.standard_normal())) for n in range(30)]
        theirs = [sample(f"q{n}", 50 * np.exp(0.15 * generator.standard_normal())) for n in range(30)]
        result = ratio(ours, theirs)
        assert result is not None
        covered += result.lo <= 1.1 <= result.hi
    assert covered >= 34
    assert ratio([], [sample("q", 5.0)]) is None


def test_warm_up_ends_when_the_rate_stands_still() -> None:
    generator = np.random.default_rng(2)
    ramp = [50 * (1 - 0.5 * np.exp(-n / 4)) * (1 + 0.02 * generator.standard_normal()) for n in range(40)]
    assert not is_stationary(ramp[:6], 6)
    assert is_stationary(ramp, 6)
    assert not is_stationary([50.0, 50.0], 4)
    assert is_stationary([50.0] * 4, 4)
    assert not is_stationary([40.0, 42.0, 44.0, 46.0, 48.0, 50.0], 6)
    assert WarmupRule.scaled(200) == WarmupRule(10, 60)
    assert WarmupRule.scaled(20) == WarmupRule(4, 10)


def test_budget_arithmetic() -> None:
    assert [Limits(boots, 1.0).confirm_boots for boots in (1, 2, 3, 4, 6)] == [0, 0, 1, 2, 2]
    limits, rule = Limits(6, 10.0), WarmupRule(4, 10)
    guess = costs((), 128)
    assert not guess.measured and guess.question_s == pytest.approx(0.3 + 128 / 60)
    records = [record(0, space().default), record(1, Knobs(2, "none", 4), outcome=Outcome.INTERRUPTED)]
    have = left(limits, records)
    assert (have.search_boots, have.confirm_boots) == (3, 5)
    assert have.seconds == pytest.approx(600 - 94)
    cost = costs(records, 128)
    assert cost.measured and cost.boot_s == 50 and cost.question_s == pytest.approx(2.0)
    assert cost.boot_with(20, rule) == pytest.approx(50 + 24 * 2 + 4)
    assert affords_search(limits, have, cost, 20, rule)
    assert not affords_search(limits, have._replace(seconds=300.0), cost, 20, rule)
    assert confirm_questions(have._replace(seconds=300.0), cost, 2, 20, rule, 200) == 44
    assert confirm_questions(have._replace(seconds=3000.0), cost, 2, 20, rule, 200) == 200
    assert confirm_questions(have._replace(seconds=120.0), cost, 2, 20, rule, 200) == 0
    assert "6 boots x ~60 s (guessed until the first boot)" in announce(limits, left(limits, ()), guess, 20, rule)
    assert "~50 s (measured)" in announce(limits, have, cost, 20, rule)


def test_a_free_question_costs_nothing() -> None:
    assert confirm_questions(left(Limits(3, 10.0), ()), Costs(1.0, 0.0, True), 1, 5, WarmupRule(4, 4), 80) == 80


def test_the_gate_needs_evidence() -> None:
    same = [sample(f"q{n}", 50.0) for n in range(20)]
    assert paired(same, same) == Paired(20, 0, 0)
    assert not non_inferior(Paired(20, 0, 0)), "20 equal answers do not rule out a loss of 5 points"
    assert non_inferior(Paired(60, 0, 0)) and non_inferior(Paired(200, 6, 4))
    assert not non_inferior(Paired(200, 20, 4))
    assert screened_out(Paired(20, 3, 0)) and not screened_out(Paired(20, 2, 0))
    assert informative(same) and not informative([]) and not informative([sample("q", 5.0, correct=False)])


DEFAULT = Knobs(1, "none", 4)
FAST = Knobs(2, "none", 4)
LOSSY = Knobs(2, "none", 0)


def test_a_confirmed_win() -> None:
    records = [record(0, DEFAULT, 50), record(1, FAST, 62)]
    assert challenger(DEFAULT, records) == FAST
    assert pending(DEFAULT, records) == (FAST, DEFAULT)
    provisional = decide(DEFAULT, records)
    assert provisional is not None and provisional.result == "wins" and not provisional.confirmed
    records += [record(2, FAST, 60, phase="confirm", questions=60), record(3, DEFAULT, 50.5, phase="confirm")]
    assert pending(DEFAULT, records) == ()
    verdict = decide(DEFAULT, records)
    assert verdict is not None and verdict.winner == FAST and verdict.confirmed
    assert verdict.estimate.n == 60, "the picked trial's own figure is not part of the winner's"
    assert verdict.vs_default is not None and 1.17 < verdict.vs_default.value < 1.21
    assert verdict.repeat_spread == pytest.approx(0.01, abs=1e-3)


def test_a_gain_within_the_noise_is_a_tie() -> None:
    records = [record(0, DEFAULT, 50, jitter=0.2), record(1, FAST, 51, jitter=0.2)]
    verdict = decide(DEFAULT, records)
    assert verdict is not None and verdict.result == "tie" and verdict.winner == DEFAULT
    records = [record(0, DEFAULT, 50), record(1, FAST, 53), record(2, FAST, 53, phase="confirm")]
    records.append(record(3, DEFAULT, 54, phase="confirm"))
    verdict = decide(DEFAULT, records)
    assert verdict is not None and verdict.winner == DEFAULT, "two boots of the default differ by more than the gain"


def test_fewer_fp4_experts_win_only_with_their_answers() -> None:
    good = [record(0, DEFAULT, 50), record(1, LOSSY, 80)]
    few = decide(DEFAULT, good)
    assert few is not None and few.result == "quality"
    good += [record(2, LOSSY, 80, phase="confirm", questions=60), record(3, DEFAULT, 50, phase="confirm", questions=60)]
    enough = decide(DEFAULT, good)
    assert enough is not None and enough.result == "wins" and enough.quality == Paired(60, 0, 0)
    bad = [*good[:2], record(2, LOSSY, 80, phase="confirm", questions=60, wrong=9), good[3]]
    verdict = decide(DEFAULT, bad)
    assert verdict is not None and verdict.result == "quality" and verdict.winner == DEFAULT


def test_without_a_valid_default_the_best_is_provisional() -> None:
    records = [record(0, DEFAULT, outcome=Outcome.CRASHED), record(1, FAST, 60)]
    verdict = decide(DEFAULT, records)
    assert verdict is not None and verdict.result == "no_default" and verdict.winner == FAST


def test_a_failed_confirmation_passes_the_chance_on() -> None:
    other = Knobs(1, "compact", 4)
    records = [record(0, DEFAULT, 50), record(1, FAST, 62), record(2, other, 55)]
    records.append(record(3, FAST, phase="confirm", outcome=Outcome.CRASHED))
    assert pending(DEFAULT, records) == (other, DEFAULT)


def test_a_slower_challenger_is_not_booted_again() -> None:
    records = [record(0, DEFAULT, 50), record(1, FAST, 40)]
    assert pending(DEFAULT, records) == (DEFAULT,)
    verdict = decide(DEFAULT, records)
    assert verdict is not None and verdict.result == "slower"


def test_the_effect_of_a_knob_comes_from_pairs_that_differ_in_it_alone() -> None:
    records = [record(0, DEFAULT, 50), record(1, FAST, 60), record(2, dataclasses.replace(FAST, fp4_top=16), 57)]
    found = effects(records)
    assert [(e.knob, e.before, e.after) for e in found] == [("cpu_threads", 1, 2), ("fp4_top", 4, 16)]
    assert found[0].speed.value == pytest.approx(1.2, rel=0.01)


def test_a_trial_asks_questions_from_the_whole_set() -> None:
    items = exam(items=200).asked
    order = in_spread_order(items)
    assert sorted(order, key=lambda item: item.id) == sorted(items, key=lambda item: item.id)
    first = sorted(int(item.id[1:]) for item in order[:20])
    assert max(np.diff([*first, 200 + first[0]])) <= 20
    assert in_spread_order(items[:1]) == items[:1]
