"""Whole studies on a simulated box: the course, the budget, failures, kills and Ctrl-C, and what is left on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import optuna
import pytest

from tandem.errors import UsageError
from tandem_tuner.budget import Limits
from tandem_tuner.confirm import decide
from tandem_tuner.loop import next_step, run_study
from tandem_tuner.records import Outcome
from tandem_tuner.space import Knobs
from tandem_tuner.study import TRIALS, Study, find_studies, locked, new_directory, read_records
from tests.tuner.builders import UTC, exam, new_study, space
from tests.tuner.fake import FakeDriver, Killed, Noise, Script, two_core_truth

LIMITS = Limits(max_boots=6, max_minutes=13.0)
QUIET = Noise(request=0.03, boot=0.004, ramp=0.3)


def run(study: Study, driver: FakeDriver, limits: Limits = LIMITS) -> list[str]:
    said: list[str] = []
    run_study(study, driver, exam(), limits, said.append)
    return said


def test_a_study_finds_the_best_settings_within_its_budget(tmp_path: Path) -> None:
    study, driver = new_study(tmp_path / "s"), FakeDriver(noise=QUIET, accuracy=lambda _: 0.0)
    said = run(study, driver)
    verdict = decide(study.space.default, study.records)
    assert verdict is not None and verdict.result == "wins" and verdict.confirmed
    best = max((k for k in study.space.feasible if k.fp4_top >= 4), key=lambda k: two_core_truth(k.settings()))
    assert two_core_truth(verdict.winner.settings()) >= 0.97 * two_core_truth(best.settings())
    assert len(driver.booted) <= LIMITS.max_boots and driver.clock_s <= LIMITS.max_minutes * 60
    assert not driver.alive
    assert "6 boots" in said[0] and "Ctrl-C" in said[0]


def test_nothing_is_booted_twice_in_the_search(tmp_path: Path) -> None:
    study, driver = new_study(tmp_path / "s"), FakeDriver()
    run(study, driver, Limits(30, 600.0))
    searched = [Knobs.of(record.settings) for record in study.records if record.phase == "search"]
    assert len(searched) == len(set(searched)) == len(study.space.feasible)
    assert searched[0] == study.space.default


@pytest.mark.parametrize("outcome", [
    Outcome.OOM_HOST, Outcome.BOOT_TIMEOUT, Outcome.CRASHED, Outcome.SELFCHECK_FAILED, Outcome.HUNG,
    Outcome.WRONG_PROFILE, Outcome.REQUEST_FAILED, Outcome.PORT_IN_USE,
])  # fmt: skip
def test_a_failure_is_typed_and_never_scored(tmp_path: Path, outcome: Outcome) -> None:
    study = new_study(tmp_path / "s")
    driver = FakeDriver(script=Script(outcomes={"cpu_threads=2": outcome}))
    run(study, driver, Limits(5, 60.0))
    failed = [record for record in study.records if record.settings.cpu_threads == 2]
    assert failed and all(record.outcome is outcome and record.detail for record in failed)
    trials = study.ledger.study.get_trials()
    assert {trials[r.trial].state for r in failed if r.trial is not None} == {optuna.trial.TrialState.FAIL}
    assert all(trials[r.trial].value is None for r in failed if r.trial is not None)
    verdict = decide(study.space.default, study.records)
    assert verdict is not None and verdict.winner.cpu_threads == 1
    assert not driver.alive


def test_no_valid_trial_gives_no_verdict(tmp_path: Path) -> None:
    study = new_study(tmp_path / "s")
    outcomes = dict.fromkeys(range(20), Outcome.CRASHED)
    run(study, FakeDriver(script=Script(outcomes=outcomes)), Limits(4, 60.0))
    assert decide(study.space.default, study.records) is None
    assert len(study.records) == 2  # the two confirmation boots have nothing to confirm


def test_settings_that_answer_worse_cannot_win(tmp_path: Path) -> None:
    study = new_study(tmp_path / "s")
    driver = FakeDriver(noise=QUIET, accuracy=lambda settings: 0.95 if settings.fp4_top >= 4 else 0.5)
    run(study, driver, Limits(12, 120.0))
    worse = [record for record in study.records if record.settings.fp4_top == 0]
    assert worse and {record.outcome for record in worse} == {Outcome.QUALITY_GATE}
    verdict = decide(study.space.default, study.records)
    assert verdict is not None and verdict.winner.fp4_top >= 4


def test_questions_that_show_no_loss_keep_the_default_quality(tmp_path: Path) -> None:
    study = new_study(tmp_path / "s")
    run(study, FakeDriver(accuracy=lambda _: 0.02), Limits(30, 600.0))
    assert all(record.settings.fp4_top >= study.space.default.fp4_top for record in study.records)


def test_time_ends_a_study_before_its_boots(tmp_path: Path) -> None:
    study, driver = new_study(tmp_path / "s"), FakeDriver()
    run(study, driver, Limits(20, 6.0))
    assert driver.clock_s <= 6 * 60
    assert any(record.phase == "confirm" for record in study.records)


def test_a_boot_that_eats_the_budget_is_cut(tmp_path: Path) -> None:
    study, driver = new_study(tmp_path / "s"), FakeDriver(boot_s=400.0)
    run(study, driver, Limits(6, 5.0))
    assert driver.clock_s <= 5 * 60 + 5
    assert study.records[0].outcome is Outcome.BOOT_TIMEOUT


def test_slow_questions_are_cut_at_the_deadline(tmp_path: Path) -> None:
    study = new_study(tmp_path / "s")
    driver = FakeDriver(truth=lambda _: 4.0)  # 25 s a question
    run(study, driver, Limits(2, 3.0))
    assert study.records[0].outcome is Outcome.OUT_OF_TIME
    assert driver.clock_s <= 3 * 60 + 60


def _trace(records: tuple) -> list[tuple]:
    return [(r.phase, r.why, r.settings) for r in records if r.outcome is not Outcome.INTERRUPTED]


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(lambda events: (1, events // 3, events - 10), id="some"),
        pytest.param(lambda events: range(1, events + 1, 3), id="many", marks=pytest.mark.full),
    ],
)
def test_a_kill_at_any_point_changes_nothing_that_follows(
    tmp_path: Path, chosen: Callable[[int], Iterable[int]]
) -> None:
    """kill -9 at a virtual event: recorded lines keep their bytes, and the study goes on as it would have."""
    limits = Limits(5, 20.0)
    whole, driver = new_study(tmp_path / "whole"), FakeDriver()
    run(whole, driver, limits)
    expected, events = _trace(whole.records), driver.events
    for event in chosen(events):
        path = tmp_path / f"killed-{event}"
        study = new_study(path)
        with pytest.raises(Killed):
            run(study, FakeDriver(kill_at_event=event), limits)
        before = (path / TRIALS).read_bytes() if (path / TRIALS).exists() else b""
        resumed = Study.resume(path, space(), UTC)
        assert (path / TRIALS).read_bytes().startswith(before)
        assert resumed.records[-1].outcome is Outcome.INTERRUPTED
        step = next_step(resumed, exam(), limits)
        done = len(_trace(resumed.records))
        assert step is not None and (step.phase, step.why, step.knobs.settings()) == expected[done]
        states = [trial.state for trial in resumed.ledger.study.get_trials()]
        assert optuna.trial.TrialState.RUNNING not in states
        if event % 48 == 1:
            run(resumed, FakeDriver(), limits)
            assert _trace(resumed.records)[: done + 1] == expected[: done + 1]


def test_a_kill_between_record_and_ledger_is_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = new_study(tmp_path / "s")

    def killed(_: object) -> None:
        raise Killed

    monkeypatch.setattr(study.ledger, "finish", killed)
    with pytest.raises(Killed):
        run(study, FakeDriver(), Limits(1, 20.0))
    resumed = Study.resume(tmp_path / "s", space(), UTC)
    assert [record.outcome for record in resumed.records] == [Outcome.OK]
    (trial,) = resumed.ledger.study.get_trials()
    assert trial.state is optuna.trial.TrialState.COMPLETE and trial.value > 0


def test_the_ledger_is_rebuilt_from_the_records(tmp_path: Path) -> None:
    study = new_study(tmp_path / "s")
    run(study, FakeDriver(), Limits(5, 20.0))
    values = [trial.value for trial in study.ledger.study.get_trials()]
    (tmp_path / "s" / "study.db").unlink()
    resumed = Study.resume(tmp_path / "s", space(), UTC)
    assert [trial.value for trial in resumed.ledger.study.get_trials()] == values


def test_a_line_that_was_not_finished_is_dropped(tmp_path: Path) -> None:
    study = new_study(tmp_path / "s")
    run(study, FakeDriver(), Limits(1, 20.0))
    path = tmp_path / "s" / TRIALS
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"index": 1, "pha')
    assert len(read_records(tmp_path / "s")) == 1
    Study.resume(tmp_path / "s", space(), UTC)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("strike", [1.0, 30.0, 60.0, 95.0, 200.0, 390.0])
def test_ctrl_c_leaves_no_server_and_a_verdict_on_what_there_is(tmp_path: Path, strike: float) -> None:
    study, driver = new_study(tmp_path / "s"), FakeDriver(script=Script(interrupt_at=strike))
    with pytest.raises(KeyboardInterrupt):
        run(study, driver)
    assert not driver.alive
    assert study.records[-1].outcome is Outcome.INTERRUPTED
    assert not (tmp_path / "s" / "running.json").exists()
    verdict = decide(study.space.default, study.records)
    assert (verdict is None) == (not any(record.ok for record in study.records))


def test_one_process_a_study(tmp_path: Path) -> None:
    new_study(tmp_path / "s")
    with locked(tmp_path / "s"), pytest.raises(UsageError, match="is being run by process"), locked(tmp_path / "s"):
        pass
    with locked(tmp_path / "s"):
        pass


def test_studies_of_a_key_are_found_oldest_first(tmp_path: Path) -> None:
    first, second = new_directory(tmp_path, "mini"), new_directory(tmp_path, "mini")
    assert (first.name, second.name) == ("mini", "mini-2")
    study = new_study(second)
    new_study(first)
    assert find_studies(tmp_path, study.meta.key) == [first, second]
    assert find_studies(tmp_path, "other") == []
