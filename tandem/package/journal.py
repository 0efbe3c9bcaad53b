"""A pack in progress: one lock, the identity of what is being packed, and a record of each file that is finished.

Everything lives in `OUT/.pack/`, which goes away when the package is complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tandem.errors import PackageError, UsageError
from tandem.package.manifest import EXPERTS_DIR, MANIFEST_NAME, FileEntry, LayerEntry
from tandem.wire import Wire, sync_directory

JOURNAL_DIR = ".pack"
PART_SUFFIX = ".part"  # of a file that is being written


class Plan(Wire):
    """What an interrupted pack was making."""

    identity: str  # hash of the source's headers, sizes and times, the options and this build


class Journal:
    """Completion records, each written after its file was synced and renamed."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.folder = out / JOURNAL_DIR

    def begin(self, identity: str) -> None:
        """Start, or go on with the same. Raises UsageError when the folder holds the start of something else."""
        path = self.folder / "plan.json"
        if path.exists():
            if Plan.read(path, PackageError).identity != identity:
                raise UsageError(
                    f"{self.out} holds an interrupted pack of another checkpoint or with other options; repeat that "
                    "command, or start over with --overwrite"
                )
        else:
            Plan(identity=identity).write(path)
        for part in (*self.out.glob(f"*{PART_SUFFIX}"), *(self.out / EXPERTS_DIR).glob(f"*{PART_SUFFIX}")):
            part.unlink()

    def layer(self, index: int) -> LayerEntry | None:
        path = self._layer_path(index)
        return LayerEntry.read(path, PackageError) if path.exists() else None

    def finish_layer(self, entry: LayerEntry) -> None:
        entry.write(self._layer_path(entry.layer))

    def file(self, name: str) -> FileEntry | None:
        path = self._file_path(name)
        return FileEntry.read(path, PackageError) if path.exists() else None

    def finish_file(self, name: str, entry: FileEntry) -> None:
        entry.write(self._file_path(name))

    def close(self) -> None:
        shutil.rmtree(self.folder)
        sync_directory(self.out)

    def _layer_path(self, index: int) -> Path:
        return self.folder / f"layer-{index:05d}.json"

    def _file_path(self, name: str) -> Path:
        return self.folder / f"file-{name}.json"


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold OUT for one pack; the lock goes with the process. Raises UsageError while another one holds it."""
    path = out / JOURNAL_DIR / "lock"
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise UsageError(f"another `tandem pack` is writing {out}; wait for it, or choose another folder") from None
        if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
            break
        os.close(descriptor)  # a pack that just ended removed the file between our open and our lock
    try:
        yield
    finally:
        with contextlib.suppress(
            OSError
        ):  # gone with a finished journal, or there is something beside the lock to keep
            if [entry.name for entry in path.parent.iterdir()] == [path.name]:
                path.unlink()
                path.parent.rmdir()
                out.rmdir()
        os.close(descriptor)


def claim(out: Path, *, overwrite: bool) -> bool:
    """Make OUT ready, under its lock. False: it is a finished package left as it is. Raises UsageError.

    Only a package or an interrupted pack is ever overwritten, never some other folder.
    """
    ours = {JOURNAL_DIR}
    complete = (out / MANIFEST_NAME).exists()
    interrupted = (out / JOURNAL_DIR / "plan.json").exists()
    others = sorted(path.name for path in out.iterdir() if path.name not in ours)
    if overwrite and (complete or interrupted):
        (out / MANIFEST_NAME).unlink(missing_ok=True)  # first: from here on nothing opens it as a package
        sync_directory(out)
        for path in [*out.iterdir(), *(out / JOURNAL_DIR).iterdir()]:
            if path.name in (JOURNAL_DIR, "lock"):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        return True
    if complete:
        return False
    if others and not interrupted:
        raise UsageError(f"{out} is not empty and not a package ({others[0]} is in it); choose another folder")
    return True
