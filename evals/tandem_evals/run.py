"""Ask a task's questions: bounded concurrency, each record on disk before the next question, resumable."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import Field

from tandem.errors import ServerError, UsageError
from tandem.versions import TANDEM
from tandem.wire import Wire, canonical_sha256
from tandem_evals.client import Ask, new_http, stream_chat
from tandem_evals.records import RecordWriter, RequestRecord, latest, read_records
from tandem_evals.task import Item, Task

HEADER = "run.json"
RECORDS = "requests.jsonl"
GIVE_UP_AFTER = 3  # failed requests in a row: the server is gone, the rest would only fail too
TELL_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How a task is asked."""

    url: str
    model: str
    epochs: int = 1
    concurrency: int = 1  # 1 for every figure in a table: batching changes greedy tokens
    seed: int = 0
    temperature: float = 0.0
    timeout_s: float = 600.0  # of one request
    boot: int = 0
    profile_sha256: str | None = None  # what the server said it runs
    config_sha256: str | None = None
    api_key: str | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "concurrency"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least 1")


class RunHeader(Wire):
    """What a folder of records belongs to; records of another run never mix with them."""

    schema_name: Literal["tandem/eval-run/1"] = Field(default="tandem/eval-run/1", alias="schema")
    task: str  # name/version
    origin: str  # of the items
    items: int
    items_sha256: str
    epochs: int
    model: str
    profile_sha256: str | None
    config_sha256: str | None
    seed: int
    temperature: float
    max_tokens: int
    concurrency: int
    tandem: str
    created_utc: str


class RunResult(NamedTuple):
    """All records that count, in the order of asking."""

    header: RunHeader
    records: tuple[RequestRecord, ...]
    asked_now: int  # the others were there from an earlier run


class _Job(NamedTuple):
    ask: Ask
    item: Item


def run_task(task: Task, settings: RunSettings, out: Path, tell: Callable[[str], None]) -> RunResult:
    """Ask what `out` has no answer to yet, and return the whole run.

    Failed requests are asked again at the next call with the same `out`. Raises ServerError when any are left,
    UsageError when `out` holds another run. Ctrl-C keeps every finished record.
    """
    header = _open_folder(task, settings, out, tell)
    path = out / RECORDS
    with RecordWriter(path) as writer:
        if writer.dropped_bytes:
            tell(f"{path}: dropped a last record that was cut off ({writer.dropped_bytes} bytes); it is asked again")
        done = {key for key, record in latest(read_records(path).records).items() if record.outcome != "error"}
        jobs = [job for job in _jobs(task, settings) if (job.item.id, job.ask.epoch) not in done]
        if done:
            tell(f"{task.label}: {len(done)} answers are there already, {len(jobs)} to ask")
        progress = _Progress(task.label, len(jobs), settings.concurrency, tell)
        failed_in_a_row = 0
        for record in _ask_all(task, settings, jobs, writer):
            progress.step(record)
            failed_in_a_row = failed_in_a_row + 1 if record.outcome == "error" else 0
            if failed_in_a_row >= GIVE_UP_AFTER:
                raise ServerError(
                    f"{task.label}: {failed_in_a_row} requests failed in a row, the last with: {record.error}; "
                    f"what was answered is kept in {out}, and `--out {out}` goes on from there"
                )
    kept = latest(read_records(path).records)
    records = tuple(kept[job.item.id, job.ask.epoch] for job in _jobs(task, settings))
    failed = [record for record in records if record.outcome == "error"]
    if failed:
        raise ServerError(
            f"{task.label}: {len(failed)} of {len(records)} requests failed, the first with: {failed[0].error}; "
            f"`--out {out}` asks only these again"
        )
    return RunResult(header, records, len(jobs))


def load_run(task: Task, out: Path) -> RunResult | None:
    """The run in `out` when every question of `task` has an answer there; no server is needed. Else None."""
    if not (out / HEADER).exists():
        return None
    header = RunHeader.read(out / HEADER, UsageError)
    if (header.task, header.items_sha256) != (task.label, items_sha256(task.items)):
        return None
    kept = latest(read_records(out / RECORDS).records)
    keys = [(item.id, epoch) for epoch in range(header.epochs) for item in task.items]
    if any(key not in kept or kept[key].outcome == "error" for key in keys):
        return None
    return RunResult(header, tuple(kept[key] for key in keys), 0)


def items_sha256(items: Sequence[Item]) -> str:
    return canonical_sha256([[item.id, item.question, item.answer] for item in items])


def _jobs(task: Task, settings: RunSettings) -> Iterator[_Job]:
    index = 0
    for epoch in range(settings.epochs):
        for item in task.items:
            yield _Job(Ask(index, item.id, epoch, settings.boot, "measured"), item)
            index += 1


def _open_folder(task: Task, settings: RunSettings, out: Path, tell: Callable[[str], None]) -> RunHeader:
    header = RunHeader(
        task=task.label,
        origin=task.origin,
        items=len(task.items),
        items_sha256=items_sha256(task.items),
        epochs=settings.epochs,
        model=settings.model,
        profile_sha256=settings.profile_sha256,
        config_sha256=settings.config_sha256,
        seed=settings.seed,
        temperature=settings.temperature,
        max_tokens=task.max_tokens,
        concurrency=settings.concurrency,
        tandem=TANDEM,
        created_utc=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
    path = out / HEADER
    if not path.exists():
        if (out / RECORDS).exists():
            raise UsageError(f"{out} holds {RECORDS} without {HEADER}; choose another --out")
        header.write(path)
        tell(f"records go to {out}")
        return header
    there = RunHeader.read(path, UsageError)
    for field in RunHeader.model_fields:
        before, now = getattr(there, field), getattr(header, field)
        if field != "created_utc" and before != now:
            raise UsageError(f"{out} holds a run with {field} {before!r}, not {now!r}; choose another --out")
    return there


def _ask_all(task: Task, settings: RunSettings, jobs: Sequence[_Job], writer: RecordWriter) -> Iterator[RequestRecord]:
    """Judged records as they arrive, written before the same asker sends its next request.

    The askers are daemon threads: Ctrl-C does not wait for requests in flight, and these are not written any more.
    """
    todo: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
    finished: queue.SimpleQueue[RequestRecord | BaseException] = queue.SimpleQueue()
    stop = threading.Event()
    writing = threading.Lock()
    http = new_http(settings.api_key)

    def work() -> None:
        while (job := todo.get()) is not None and not stop.is_set():
            try:
                record = stream_chat(
                    settings.url,
                    settings.model,
                    task.prompt(job.item),
                    max_tokens=task.max_tokens,
                    seed=settings.seed + job.ask.epoch,
                    timeout_s=settings.timeout_s,
                    temperature=settings.temperature,
                    ask=job.ask,
                    http=http,
                )
                judged = task.judge(record, job.item)
                with writing:
                    if stop.is_set():
                        return
                    writer.append(judged)
                finished.put(judged)
            except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
                finished.put(error)

    for job in jobs:
        todo.put(job)
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(settings.concurrency, len(jobs)))]
    for thread in threads:
        todo.put(None)
        thread.start()
    try:
        for _ in jobs:
            result = finished.get()
            if isinstance(result, BaseException):
                raise result
            yield result
    finally:
        with writing:
            stop.set()
        http.close()


class _Progress:
    """A line on stderr every few seconds, with the time left."""

    def __init__(self, label: str, total: int, concurrency: int, tell: Callable[[str], None]) -> None:
        self.label, self.total, self.tell = label, total, tell
        self.done = self.correct = 0
        self.began = self.told = time.monotonic()
        self.concurrency = concurrency

    def step(self, record: RequestRecord) -> None:
        self.done += 1
        self.correct += record.outcome == "correct"
        now = time.monotonic()
        if now - self.told < TELL_EVERY_S and self.done < self.total:
            return
        self.told = now
        left_s = (now - self.began) / self.done * (self.total - self.done)
        self.tell(f"{self.label}: {self.done}/{self.total}, {self.correct} correct, {_duration(left_s)} left")


def _duration(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole} s" if whole < 90 else f"{round(whole / 60)} min"
