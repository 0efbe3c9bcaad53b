"""Studies, spaces and records for the tuner's tests."""

from __future__ import annotations

from pathlib import Path

from tandem.versions import TANDEM
from tandem_evals.task import Item
from tandem_tuner.loop import Exam
from tandem_tuner.records import BootRecord, Outcome, Phase, Sample
from tandem_tuner.space import Box, Knobs, PackageFacts, Space, build_space
from tandem_tuner.study import SCHEMA, Study, StudyMeta, TaskFacts, study_key

ALL_KNOBS = ("fp4_top", "cpu_threads", "pinning")
TWO_CORES = Box(cores=2, l3_groups=1)
MINI = PackageFacts(max_top=16, default_fp4_top=4, fp4_only=False)
UTC = "2026-01-01T00:00:00Z"


def space(box: Box = TWO_CORES, package: PackageFacts = MINI) -> Space:
    return build_space(box, package, ALL_KNOBS)


def exam(per_trial: int = 20, items: int = 200) -> Exam:
    asked = tuple(Item(f"q{number}", f"What is {number} + 1?", f"#### {number + 1}") for number in range(items))
    warmup = tuple(Item(f"w{number}", f"What is {number} + 2?", f"#### {number + 2}") for number in range(30))
    return Exam(asked, warmup, per_trial, 128)


def meta(over: Space, per_trial: int = 20) -> StudyMeta:
    task = TaskFacts(
        name="gsm8k-200",
        version="1",
        source="test items",
        questions_sha256="0" * 64,
        questions=per_trial,
        max_tokens=128,
    )
    hard = {"cpu": "Simulated", "cores": 2}
    return StudyMeta(
        schema=SCHEMA,
        key=study_key(hard, "a" * 64, task, over),
        machine_hard=hard,
        package="/packages/mini",
        package_sha256="a" * 64,
        task=task,
        space_version=1,
        choices=dict(over.choices),
        default=over.default.settings(),
        created_utc=UTC,
        tandem=TANDEM,
    )


def new_study(path: Path, over: Space | None = None) -> Study:
    path.mkdir(parents=True, exist_ok=True)
    over = over or space()
    return Study.create(path, meta(over), over)


def sample(item: str, tok_s: float, *, correct: bool = True, tokens: int = 101, warmup: bool = False) -> Sample:
    return Sample(
        item=item,
        phase="warmup" if warmup else "measured",
        prompt_tokens=50,
        completion_tokens=tokens,
        ttft_ns=100_000_000,
        decode_ns=int((tokens - 1) / tok_s * 1e9),
        outcome="correct" if correct else "wrong",
        truncated=False,
    )


def record(
    index: int,
    knobs: Knobs,
    tok_s: float = 50.0,
    *,
    phase: Phase = "search",
    outcome: Outcome = Outcome.OK,
    why: str = "default",
    questions: int = 20,
    wrong: int = 0,
    jitter: float = 0.02,
    boot_s: float = 50.0,
) -> BootRecord:
    """A boot at `tok_s`, its questions spread evenly by +-jitter; the first `wrong` of them answered wrong."""
    spread = [1 + jitter * (2 * number / max(1, questions - 1) - 1) for number in range(questions)]
    samples = tuple(
        sample(f"q{number}", tok_s * factor, correct=number >= wrong) for number, factor in enumerate(spread)
    )
    return BootRecord(
        index=index,
        phase=phase,
        trial=None,
        why=why,
        settings=knobs.settings(),
        outcome=outcome,
        detail="" if outcome is Outcome.OK else "scripted",
        profile_sha256=None,
        boot_s=boot_s,
        wall_s=boot_s + 2.0 * questions + 4.0,
        samples=samples if outcome in (Outcome.OK, Outcome.QUALITY_GATE) else (),
        started_utc=UTC,
    )
