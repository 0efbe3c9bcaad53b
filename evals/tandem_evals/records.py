"""One record a request, from the client to every table: the type, the append-only file, and its reader."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple

from pydantic import Field

from tandem.errors import CheckError, UsageError
from tandem.wire import Wire

SCHEMA: Literal["tandem/request/1"] = "tandem/request/1"
Phase = Literal["warmup", "measured", "rejected"]
AnswerOutcome = Literal["correct", "wrong", "unparsed", "truncated", "error", "unscored"]
Scalar = bool | int | float | str


class RequestRecord(Wire):
    """One streamed request. Times are of one monotonic clock, in ns; they compare within one boot of the client."""

    schema_name: Literal["tandem/request/1"] = Field(default=SCHEMA, alias="schema")
    index: int  # position in the order of asking
    item: str
    epoch: int
    boot: int  # of the server, counted by the caller
    phase: Phase
    t_send_ns: int
    t_first_ns: int | None  # arrival of the first token; None: none came
    t_last_ns: int | None  # arrival of the last token
    chunk_ns: tuple[int, ...]  # of each chunk with tokens, since the chunk before; the first is 0
    chunk_tokens: tuple[int, ...]  # tokens in each of these chunks; empty when the server does not tell
    prompt_tokens: int
    completion_tokens: int  # as the server's usage says; the end token counts
    finish: str | None
    content: str
    reasoning: str
    answer: str | None  # what was extracted from content
    outcome: AnswerOutcome
    error: str | None  # why the outcome is `error`
    attempts: int
    seed: int
    params: dict[str, Scalar]  # what was asked for: temperature, max_tokens, ...
    counters: dict[str, int]  # what the engine counted during this request; empty when it does not tell

    @property
    def decode_ns(self) -> int:
        """From the first token's arrival to the last one's; 0 when nothing can be timed."""
        if self.t_first_ns is None or self.t_last_ns is None:
            return 0
        return self.t_last_ns - self.t_first_ns

    @property
    def ttft_ns(self) -> int | None:
        return None if self.t_first_ns is None else self.t_first_ns - self.t_send_ns

    @property
    def truncated(self) -> bool:
        """Did the reply end at max_tokens?"""
        return self.finish == "length"

    def line(self) -> bytes:
        document = self.model_dump(mode="json", by_alias=True)
        return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode() + b"\n"


class RecordFile(NamedTuple):
    """What a file holds."""

    records: tuple[RequestRecord, ...]
    torn_bytes: int  # of a last line that a kill cut off; it is not among the records


def read_records(path: Path) -> RecordFile:
    """Read a file of records; a missing file holds none. Raises CheckError for a damaged line that is not the last."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return RecordFile((), 0)
    whole, _, torn = data.rpartition(b"\n")
    lines = whole.split(b"\n") if whole else []
    parse = RequestRecord.parse
    records = tuple(parse(line, f"{path}:{number}", CheckError) for number, line in enumerate(lines, 1))
    return RecordFile(records, len(torn))


class RecordWriter:
    """Appends records, each on disk before the next request; only one process may write a file.

    A torn last line is cut off when the file is opened; `dropped_bytes` says so.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise UsageError(f"{path} is being written by another run; choose another --out, or stop it") from None
        self.dropped_bytes = read_records(path).torn_bytes
        if self.dropped_bytes:
            self._file.truncate(self._file.seek(0, os.SEEK_END) - self.dropped_bytes)

    def append(self, record: RequestRecord) -> None:
        self._file.write(record.line())
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def latest(records: Sequence[RequestRecord]) -> dict[tuple[str, int], RequestRecord]:
    """The last record of each (item, epoch): an item that failed is asked again, and then the new answer counts."""
    return {(record.item, record.epoch): record for record in records}
