"""JSON that crosses a process or a year: strict models, canonical bytes, atomic writes."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from tandem.errors import TandemError

WireT = TypeVar("WireT", bound="Wire")


class Wire(BaseModel):
    """A frozen JSON document. An unknown key is an error; there are no silent conversions between types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, ser_json_inf_nan="constants")

    @classmethod
    def parse(cls: type[WireT], text: str | bytes, where: str, error: type[TandemError]) -> WireT:
        """Read `text`; raise `error` with one line that names `where`, the field and the reason."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as problem:
            first = problem.errors(include_url=False)[0]
            field = ".".join(str(part) for part in first["loc"]) or "document"
            if first["type"] == "extra_forbidden":
                valid = ", ".join(sorted(field.alias or name for name, field in cls.model_fields.items()))
                raise error(f"{where}: unknown key {field!r}; top-level keys are {valid}") from None
            more = problem.error_count() - 1
            raise error(f"{where}: {field}: {first['msg']}" + (f" (and {more} more)" if more else "")) from None

    @classmethod
    def read(cls: type[WireT], path: Path, error: type[TandemError]) -> WireT:
        """Read the file `path`; a missing or unreadable file raises `error` too."""
        try:
            text = path.read_bytes()
        except OSError as problem:
            raise error(f"{path}: {problem.strerror or problem}") from None
        return cls.parse(text, str(path), error)

    def pretty(self) -> str:
        return json.dumps(self.model_dump(mode="json", by_alias=True), indent=1, sort_keys=True, allow_nan=False) + "\n"

    def write(self, path: Path) -> None:
        write_atomic(path, self.pretty().encode())


def canonical_json(value: Any) -> bytes:
    """`value` as sorted, compact, NaN-free JSON: the bytes that every hash in Tandem is taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True).encode()


def canonical_sha256(value: Any) -> str:
    return hashlib.sha256(canonical_json(value)).hexdigest()


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` under a temporary name, fsync, rename: a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames inside `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
