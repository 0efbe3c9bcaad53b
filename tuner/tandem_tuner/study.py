"""A study on disk: what it is about, what was recorded, and what was running when it was killed.

`study.json` is written once; `trials.jsonl` only grows; `running.json` stands while a server runs; `study.db` is
Optuna's. One process a study: a lock that the kernel drops with its holder.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from tandem.errors import TuneError, UsageError
from tandem.profile import Fact
from tandem.wire import Wire, canonical_json, canonical_sha256
from tandem_tuner.ledger import Ledger
from tandem_tuner.records import BootRecord, Outcome, Phase, Settings
from tandem_tuner.space import SPACE_VERSION, Space

SCHEMA: Literal["tandem/study/1"] = "tandem/study/1"
META, TRIALS, RUNNING, DATABASE, LOCK, PROFILE = (
    "study.json", "trials.jsonl", "running.json", "study.db", "lock", "profile.json",
)  # fmt: skip
KEY_HEX = 12


class TaskFacts(Wire):
    """What is asked, and how."""

    name: str
    version: str
    source: str  # where the questions came from, for a person
    questions_sha256: str  # of every question that may be asked, in order
    questions: int  # a trial
    max_tokens: int


class StudyMeta(Wire):
    """`study.json`."""

    schema_name: Literal["tandem/study/1"] = Field(alias="schema")
    key: str  # hash of everything that makes two studies the same one
    machine_hard: dict[str, Fact]
    package: str  # path, for a person
    package_sha256: str
    task: TaskFacts
    space_version: int
    choices: dict[str, tuple[int | str, ...]]  # of each knob
    default: Settings
    created_utc: str
    tandem: str


class Running(Wire):
    """`running.json`: the boot that was begun and not recorded yet."""

    index: int
    phase: Phase
    trial: int | None
    why: str
    settings: Settings
    started_utc: str


def study_key(machine_hard: Mapping[str, Any], package_sha256: str, task: TaskFacts, space: Space) -> str:
    """Equal keys may be resumed into each other: same box, package, questions, knobs and meaning of the knobs."""
    what = task.model_dump(mode="json")
    del what["source"]
    knobs = [SPACE_VERSION, {name: list(values) for name, values in space.choices.items()}, str(space.default)]
    return canonical_sha256([dict(machine_hard), package_sha256, what, knobs])


def find_studies(folder: Path, key: str) -> list[Path]:
    """The studies of this key, oldest first."""
    found = []
    for path in folder.glob(f"*/{META}"):
        meta = StudyMeta.read(path, TuneError)
        if meta.key == key:
            found.append((meta.created_utc, path.parent.name, path.parent))
    return [directory for _, _, directory in sorted(found)]


def new_directory(folder: Path, stem: str) -> Path:
    """`stem`, or `stem-2`, `stem-3` ... : the first name that is free. Created, so that two processes differ."""
    number = 1
    while True:
        directory = folder / (stem if number == 1 else f"{stem}-{number}")
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            number += 1
            continue
        return directory


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the study. Raises UsageError when another process does."""
    handle = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(handle, 32, 0).decode().strip() or "unknown"
            raise UsageError(
                f"study {directory.name} is being run by process {holder}; wait for it, or stop it with Ctrl-C"
            ) from None
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)


def read_records(directory: Path) -> tuple[BootRecord, ...]:
    """Every whole line of trials.jsonl. A last line without its end was never recorded."""
    path = directory / TRIALS
    if not path.exists():
        return ()
    lines = path.read_bytes().split(b"\n")[:-1]
    records = tuple(BootRecord.parse(line, f"{path}:{number}", TuneError) for number, line in enumerate(lines, start=1))
    for number, record in enumerate(records):
        if record.index != number:
            raise TuneError(f"{path}:{number + 1}: record {record.index} where {number} belongs; the file was edited")
    return records


class Study:
    """An open, locked study."""

    def __init__(self, directory: Path, meta: StudyMeta, space: Space) -> None:
        self.directory = directory
        self.meta = meta
        self.space = space
        self.records = read_records(directory)
        self.ledger = Ledger(directory / DATABASE, space)

    @classmethod
    def create(cls, directory: Path, meta: StudyMeta, space: Space) -> Study:
        meta_path = directory / META
        meta_path.write_bytes(canonical_json(meta.model_dump(mode="json", by_alias=True)) + b"\n")
        return cls(directory, meta, space)

    @classmethod
    def resume(cls, directory: Path, space: Space, utc: str) -> Study:
        """Open it, cut a half-written line, and record a boot that was running at a kill as interrupted."""
        _cut_partial_line(directory / TRIALS)
        study = cls(directory, StudyMeta.read(directory / META, TuneError), space)
        study._close_running(utc)
        study.ledger.reconcile(study.records)
        return study

    @property
    def profile_path(self) -> Path:
        """One path for every boot: vLLM hashes it into its compile key, so a new one would recompile."""
        return self.directory / PROFILE

    def boot_directory(self, index: int) -> Path:
        return self.directory / "boots" / f"{index:03d}"

    def begin(self, phase: Phase, why: str, settings: Settings, utc: str) -> Running:
        """Say what is about to run, so that a kill leaves a trace."""
        trial = self.ledger.begin(settings) if phase == "search" else None
        running = Running(
            index=len(self.records), phase=phase, trial=trial, why=why, settings=settings, started_utc=utc
        )
        running.write(self.directory / RUNNING)
        return running

    def finish(self, record: BootRecord) -> None:
        """Record first, then tell Optuna: a kill between the two is mended by `resume`."""
        self._append(record)
        if record.trial is not None:
            self.ledger.finish(record)
        (self.directory / RUNNING).unlink(missing_ok=True)

    def interrupt(self, running: Running, utc: str) -> None:
        """The tuner was asked to stop while this ran."""
        self.finish(_interrupted(running, utc, "the tuner was stopped while it ran"))

    def _append(self, record: BootRecord) -> None:
        line = canonical_json(record.model_dump(mode="json")) + b"\n"
        handle = os.open(self.directory / TRIALS, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(handle, line)
            os.fsync(handle)
        finally:
            os.close(handle)
        self.records = (*self.records, record)

    def _close_running(self, utc: str) -> None:
        path = self.directory / RUNNING
        if not path.exists():
            return
        running = Running.read(path, TuneError)
        if running.index == len(self.records):
            self._append(_interrupted(running, utc, "the tuner was killed while it ran"))
        path.unlink(missing_ok=True)


def _interrupted(running: Running, utc: str, detail: str) -> BootRecord:
    return BootRecord(
        index=running.index,
        phase=running.phase,
        trial=running.trial,
        why=running.why,
        settings=running.settings,
        outcome=Outcome.INTERRUPTED,
        detail=f"{detail}; noticed {utc}",
        profile_sha256=None,
        boot_s=0.0,
        wall_s=0.0,
        samples=(),
        started_utc=running.started_utc,
    )


def _cut_partial_line(path: Path) -> None:
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
