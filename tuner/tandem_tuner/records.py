"""What a study remembers: one strict record a boot, with every question's timing in it. Pure data."""

from __future__ import annotations

from enum import Enum
from typing import Literal

from tandem.wire import Wire
from tandem_evals.records import AnswerOutcome, RequestRecord

Phase = Literal["search", "confirm"]


class Outcome(str, Enum):
    """How a boot ended: every end of a server (`tandem.outcome.Outcome`, the same values) and of a trial.

    Only `ok` has a speed; the others are never scored.
    """

    OK = "ok"
    INFEASIBLE_PLAN = "infeasible_plan"  # the bytes do not fit
    OOM_HOST = "oom_host"
    OOM_GPU = "oom_gpu"
    BOOT_TIMEOUT = "boot_timeout"  # never became ready
    SELFCHECK_FAILED = "selfcheck_failed"  # a kernel differs from its reference on this box
    CRASHED = "crashed"  # the server died, booting or answering
    PORT_IN_USE = "port_in_use"
    INTERRUPTED = "interrupted"  # the tuner was stopped or killed while it ran; proposed again
    HUNG = "hung"  # the server lives, but a question got no answer in time
    REQUEST_FAILED = "request_failed"  # a question failed on a living server, and again when it was repeated
    WRONG_PROFILE = "wrong_profile"  # the server runs other settings than the tuner wrote
    QUALITY_GATE = "quality_gate"  # answers got worse than the default settings' answers
    OUT_OF_TIME = "out_of_time"  # the budget ended before enough questions were measured


class Sample(Wire):
    """One streamed question: a `RequestRecord` without its texts and chunks, fields and meanings the same."""

    item: str
    phase: Literal["warmup", "measured"]  # warm-up is kept in the record, never in the rate
    prompt_tokens: int
    completion_tokens: int  # as the server's usage says
    ttft_ns: int | None
    decode_ns: int  # from the first token's arrival to the last one's
    outcome: AnswerOutcome
    truncated: bool  # ended at max_tokens

    @classmethod
    def of(cls, record: RequestRecord) -> Sample:
        names = [name for name in cls.model_fields if name != "phase"]
        phase: Literal["warmup", "measured"] = "warmup" if record.phase == "warmup" else "measured"
        return cls(phase=phase, **{name: getattr(record, name) for name in names})

    @property
    def correct(self) -> bool:
        return self.outcome == "correct"

    @property
    def rate_tok_s(self) -> float | None:
        """Of this question alone; None when nothing could be timed."""
        if self.completion_tokens < 2 or self.decode_ns <= 0:
            return None
        return (self.completion_tokens - 1) / (self.decode_ns / 1e9)


class Settings(Wire):
    """The knobs of one boot; fields of TandemConfig."""

    cpu_threads: int
    pinning: str
    fp4_top: int


class BootRecord(Wire):
    """One line of trials.jsonl."""

    index: int  # line number, from 0
    phase: Phase
    trial: int | None  # Optuna's number; None for a confirmation
    why: str  # what proposed it
    settings: Settings
    outcome: Outcome
    detail: str  # one line for a failure, empty otherwise
    profile_sha256: str | None
    boot_s: float  # until ready; until it failed for a failure
    wall_s: float  # the whole boot, warm-up, questions and stop
    samples: tuple[Sample, ...]
    started_utc: str

    @property
    def ok(self) -> bool:
        return self.outcome is Outcome.OK

    @property
    def measured(self) -> tuple[Sample, ...]:
        """The samples that count."""
        return tuple(sample for sample in self.samples if sample.phase == "measured")

    @property
    def warmup_n(self) -> int:
        return sum(sample.phase == "warmup" for sample in self.samples)

    @property
    def truncated(self) -> int:
        return sum(sample.truncated for sample in self.measured)

    @property
    def correct(self) -> int:
        return sum(sample.correct for sample in self.measured)


def settled(records: tuple[BootRecord, ...]) -> tuple[BootRecord, ...]:
    """The records that decide what comes next: an interrupted boot decides nothing."""
    return tuple(record for record in records if record.outcome is not Outcome.INTERRUPTED)


def pooled(records: tuple[BootRecord, ...]) -> tuple[Sample, ...]:
    """The measured samples of several boots of the same settings."""
    return tuple(sample for record in records for sample in record.measured)
