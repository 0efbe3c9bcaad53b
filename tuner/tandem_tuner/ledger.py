"""The study's Optuna database: one SQLite file, asked and told once a trial. The records decide; the ledger follows.

Proposals come from the records alone (propose.py), so Optuna's own trials are a faithful copy for its tools
(dashboards, importances), and can be rebuilt from trials.jsonl at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.samplers import BaseSampler
from optuna.trial import TrialState

from tandem_tuner.estimate import rate_tok_s
from tandem_tuner.propose import distributions
from tandem_tuner.records import BootRecord, Outcome, Settings
from tandem_tuner.space import Space

STUDY_NAME = "tandem"


class _Given(BaseSampler):  # type: ignore[misc]
    """Answers `ask` with the settings that propose.py chose."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:  # noqa: ARG002
        return {}

    def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:  # noqa: ARG002
        return {}

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:  # noqa: ARG002
        return self.settings[param_name]


class Ledger:
    """`begin` before a boot, `finish` after it, `reconcile` when a study is opened."""

    def __init__(self, path: Path, space: Space) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.over = distributions(space)
        self.given = _Given()
        self.study = optuna.create_study(
            storage=f"sqlite:///{path}",
            study_name=STUDY_NAME,
            direction="maximize",
            sampler=self.given,
            load_if_exists=True,
        )

    def begin(self, settings: Settings) -> int:
        """Ask: a running trial with these settings. Returns its number."""
        self.given.settings = settings.model_dump()
        return int(self.study.ask(self.over).number)

    def finish(self, record: BootRecord) -> None:
        """Tell: the rate of a valid trial, FAIL for any other; never a 0 in a failure's place."""
        assert record.trial is not None
        trial = self.study.get_trials(deepcopy=False)[record.trial]
        handle = optuna.trial.Trial(self.study, trial._trial_id)
        for name, value in (("outcome", record.outcome.value), ("detail", record.detail), ("record", record.index)):
            handle.set_user_attr(name, value)
        rate = rate_tok_s(record.measured) if record.ok else None
        if rate is None:
            self.study.tell(record.trial, state=TrialState.FAIL)
        else:
            self.study.tell(record.trial, rate)

    def reconcile(self, records: Sequence[BootRecord]) -> None:
        """Tell what a kill kept from being told, and close what it left running."""
        recorded = {record.trial: record for record in records if record.trial is not None}
        for number in range(max(recorded, default=-1) + 1):
            if number >= len(self._states()):
                source = recorded.get(number) or next(iter(recorded.values()))
                self.begin(source.settings)
            if self._states()[number] is TrialState.RUNNING:
                self._close(number, recorded.get(number))
        for number, state in enumerate(self._states()):
            if state is TrialState.RUNNING:
                self._close(number, None)

    def _close(self, number: int, record: BootRecord | None) -> None:
        if record is not None:
            self.finish(record)
            return
        trial = self.study.get_trials(deepcopy=False)[number]
        optuna.trial.Trial(self.study, trial._trial_id).set_user_attr("outcome", Outcome.INTERRUPTED.value)
        self.study.tell(number, state=TrialState.FAIL)

    def _states(self) -> list[TrialState]:
        return [trial.state for trial in self.study.get_trials(deepcopy=False)]
