"""Files that appear whole or not at all: written under a temporary name, hashed on the way, synced, renamed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tandem.errors import PlanError
from tandem.package.journal import PART_SUFFIX
from tandem.package.manifest import FileEntry
from tandem.package.shards import COPY_BYTES, copy_stream
from tandem.wire import sync_directory

FICLONE = 0x40049409  # ioctl: share the source file's blocks (btrfs, xfs, bcachefs)
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class HashedFile:
    """What `whole_file` hands out: `write` bytes, then read `bytes` and `sha256`."""

    def __init__(self, write: Callable[[bytes | memoryview], object]) -> None:
        self._write = write
        self._hash = hashlib.sha256()
        self.bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        self._write(data)
        self._hash.update(data)
        self.bytes += len(data)

    def pad_to(self, offset: int) -> None:
        """Zeros up to byte `offset`."""
        self.write(bytes(offset - self.bytes))

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()


@contextmanager
def whole_file(path: Path) -> Iterator[HashedFile]:
    """The file appears under `path` when the block ends well; otherwise nothing stays. Disk full is a PlanError."""
    part = path.with_name(path.name + PART_SUFFIX)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with part.open("wb") as file:
            yield HashedFile(file.write)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException as problem:
        part.unlink(missing_ok=True)
        if isinstance(problem, OSError) and problem.errno in DISK_FULL:
            raise disk_full(path) from None
        raise
    sync_directory(path.parent)


def disk_full(path: Path) -> PlanError:
    return PlanError(
        f"{path}: the disk is full; finished layers are kept, so make room and run the same command again "
        "(`tandem pack` says at its start how much it needs)"
    )


def hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(COPY_BYTES):
            digest.update(block)
    return digest.hexdigest()


def link_file(source: Path, target: Path) -> FileEntry:
    """`source` under another name: hard-linked, else sharing its blocks, else copied. Symbolic links are followed."""
    source = source.resolve()
    part = target.with_name(target.name + PART_SUFFIX)
    part.unlink(missing_ok=True)
    if not (_hard_link(source, part) or _reflink(source, part)):
        return copy_file(source, target)
    part.replace(target)
    part.unlink(missing_ok=True)  # renaming one hard link of a file over another does nothing, by POSIX
    sync_directory(target.parent)
    return FileEntry(bytes=target.stat().st_size, sha256=hash_file(target), origin="linked")


def shares_blocks(source: Path, folder: Path) -> bool:
    """Will `link_file` need no room? Only what is certain: hard links work inside one file system."""
    return source.resolve().stat().st_dev == folder.stat().st_dev


def copy_file(source: Path, target: Path) -> FileEntry:
    size = source.stat().st_size
    with source.open("rb", buffering=0) as file, whole_file(target) as out:
        copy_stream(file, size, out.write)
    return FileEntry(bytes=out.bytes, sha256=out.sha256, origin="copied")


def write_file(target: Path, data: bytes) -> FileEntry:
    with whole_file(target) as out:
        out.write(data)
    return FileEntry(bytes=out.bytes, sha256=out.sha256, origin="rewritten")


def _hard_link(source: Path, target: Path) -> bool:
    with contextlib.suppress(OSError):  # another file system, or one without links: the next way
        target.hardlink_to(source)
        return True
    return False


def _reflink(source: Path, target: Path) -> bool:
    try:
        with source.open("rb") as old, target.open("wb") as new:
            fcntl.ioctl(new.fileno(), FICLONE, old.fileno())
            os.fsync(new.fileno())
    except OSError:
        target.unlink(missing_ok=True)
        return False
    return True
