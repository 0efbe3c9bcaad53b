"""Servers whose owner died: found by their records, ended by pid and start time, never by name."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.errors import ServerError
from tandem.paths import run_dir
from tandem.server_keeper import Identity, boot_id, descendants, is_alive, send_signal

GONE_S = 15.0  # after SIGKILL: a kernel takes its time to free hundreds of GB


def servers_dir() -> Path:
    """One JSON file a running server: who owns which processes."""
    return run_dir() / "servers"


def clean_owned_orphans(records: Path | None = None, wait_s: float = 30.0, grace_s: float = 5.0) -> list[str]:
    """End the servers of Tandem processes that died without stopping them; one line for each server that was ended.

    Reads the records: a server whose recorded parent still lives is left alone. A process is ended only when its pid
    and its start time are both recorded, in this boot of the machine, or when it descends from such a process.
    wait_s: for a keeper that is already taking its server down. grace_s: between SIGTERM and SIGKILL.
    """
    folder = servers_dir() if records is None else records
    told: list[str] = []
    for record in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        document = _read_record(record)
        if document is None:
            continue
        if document["boot_id"] != boot_id():
            record.unlink(missing_ok=True)
            continue
        if is_alive(Identity(*document["parent"])):
            continue
        keeper = Identity(*document["keeper"])
        deadline = time.monotonic() + wait_s
        while is_alive(keeper) and time.monotonic() < deadline:
            time.sleep(0.1)
        owned = owned_processes(record)
        if is_alive(keeper):
            owned.append(keeper)
        living = sum(is_alive(identity) for identity in owned)
        end_processes(owned, grace_s)
        record.unlink(missing_ok=True)
        record.with_suffix(".tmp").unlink(missing_ok=True)  # the keeper was killed while it wrote
        if living:
            told.append(f"ended {living} process(es) that {document['purpose']!r} had left behind")
    return told


def _read_record(record: Path) -> dict[str, Any] | None:
    """None: it went away, its server has just been taken down."""
    try:
        document = json.loads(record.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        raise ServerError(f"{record}: not readable as JSON; check that no server is left, then delete it") from None
    return dict(document)


def owned_processes(record: Path) -> list[Identity]:
    """The recorded processes that still live, and their descendants."""
    document = _read_record(record) if record.exists() else None
    if document is None or document["boot_id"] != boot_id():
        return []
    owned = [identity for identity in (Identity(*pair) for pair in document["tree"]) if is_alive(identity)]
    for identity in list(owned):
        owned += [below for below in descendants(identity.pid) if below not in owned]
    return owned


def end_processes(owned: Sequence[Identity], grace_s: float) -> int:
    """SIGTERM, grace, SIGKILL. Returns how many needed SIGKILL."""
    for identity in owned:
        send_signal(identity, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while any(is_alive(identity) for identity in owned) and time.monotonic() < deadline:
        time.sleep(0.05)
    killed = sum(send_signal(identity, signal.SIGKILL) for identity in owned)
    deadline = time.monotonic() + GONE_S
    while any(is_alive(identity) for identity in owned) and time.monotonic() < deadline:
        time.sleep(0.05)
    return killed
