"""What to boot next: a pure function of the space, the recorded boots and the study's key.

First the default settings, then one contrast a knob from the best so far, then Optuna's TPE on everything recorded.
Nothing is proposed twice. Since only records decide, a killed and resumed study goes on exactly as if it had not been.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from tandem_tuner.estimate import rate_tok_s
from tandem_tuner.gate import informative
from tandem_tuner.records import BootRecord, settled
from tandem_tuner.space import KNOB_NAMES, Knobs, Space

DEFAULT = "default"
CONTRAST = "contrast:"
SAMPLER = "sampler"
ASKS = 64  # tries of the sampler before the first untried point is taken instead


class Proposal(NamedTuple):
    """The next point, and what chose it."""

    knobs: Knobs
    why: str  # default | contrast:KNOB | sampler


def propose(space: Space, records: Sequence[BootRecord], key: str) -> Proposal | None:
    """None when every point that may win has been tried."""
    search = tuple(record for record in settled(tuple(records)) if record.phase == "search")
    tried = {Knobs.of(record.settings) for record in search}
    if space.default not in tried:
        return Proposal(space.default, DEFAULT)
    left = tuple(knobs for knobs in space.feasible if knobs not in tried and may_win(knobs, space.default, search))
    if not left:
        return None
    return _contrast(space, search, left) or _sampled(space, search, left, key)


def may_win(knobs: Knobs, default: Knobs, search: Sequence[BootRecord]) -> bool:
    """Fewer FP4 experts than the default's may only win where the questions can show a loss of quality."""
    if knobs.fp4_top >= default.fp4_top:
        return True
    reference = next((record for record in search if Knobs.of(record.settings) == default and record.ok), None)
    return reference is not None and informative(reference.measured)


def best(records: Sequence[BootRecord]) -> BootRecord | None:
    """The fastest valid boot; the earlier one of equals."""
    rated = [(rate, record) for record in records if record.ok and (rate := rate_tok_s(record.measured)) is not None]
    return max(rated, key=lambda entry: entry[0])[1] if rated else None


def _contrast(space: Space, search: Sequence[BootRecord], left: Sequence[Knobs]) -> Proposal | None:
    """Change one knob of the best point, to the value farthest from its own; each knob once."""
    done = {record.why for record in search}
    fastest = best(search)
    base = Knobs.of(fastest.settings) if fastest else space.default
    for name in KNOB_NAMES:
        if CONTRAST + name in done:
            continue
        values = space.choices[name]
        here = values.index(getattr(base, name))
        for value in sorted(values, key=lambda value: (-abs(values.index(value) - here), -values.index(value))):
            change: dict[str, Any] = {name: value}
            knobs = dataclasses.replace(base, **change)
            if knobs in left:
                return Proposal(knobs, CONTRAST + name)
    return None


def _sampled(space: Space, search: Sequence[BootRecord], left: Sequence[Knobs], key: str) -> Proposal:
    """Ask Optuna's TPE, fed with the records and seeded by the key and their count, until it names an untried point."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    digest = hashlib.sha256(f"{key}:{len(search)}".encode()).digest()
    sampler = optuna.samplers.TPESampler(seed=int.from_bytes(digest[:4], "big"), n_startup_trials=1)
    replica = optuna.create_study(direction="maximize", sampler=sampler)
    over = distributions(space)
    for record in search:
        replica.add_trial(_frozen(record, over))
    for _ in range(ASKS):
        trial = replica.ask(over)
        knobs = Knobs(**{name: trial.params[name] for name in KNOB_NAMES})
        if knobs in left:
            return Proposal(knobs, SAMPLER)
        replica.tell(trial, state=optuna.trial.TrialState.FAIL)
    return Proposal(left[0], SAMPLER)


def distributions(space: Space) -> dict[str, Any]:
    """The space in Optuna's words."""
    from optuna.distributions import CategoricalDistribution

    return {name: CategoricalDistribution(list(space.choices[name])) for name in KNOB_NAMES}


def _frozen(record: BootRecord, over: dict[str, Any]) -> Any:
    """A record as Optuna's trial. A failure has a state, not a value."""
    from optuna.trial import TrialState, create_trial

    value = rate_tok_s(record.measured) if record.ok else None
    state = TrialState.FAIL if value is None else TrialState.COMPLETE
    return create_trial(state=state, value=value, params=record.settings.model_dump(), distributions=over)
