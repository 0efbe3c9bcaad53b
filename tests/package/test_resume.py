"""Stopped at any point and repeated, a pack ends in the same bytes; nothing half-made opens as a package."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tandem.errors import PackageError, PlanError, UsageError
from tandem.package import pack as pack_module
from tandem.package import writer
from tandem.package.journal import Journal, locked
from tandem.package.manifest import read_manifest
from tandem.package.pack import PackOptions, pack
from tandem.package.progress import Silent
from tandem.package.verify import verify
from tests import checkpoints

OPTIONS = PackOptions(codec="raw")  # as many files and steps as any other, and the quickest


class InterruptedPackError(Exception):
    pass


def tree(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return checkpoints.qwen3_moe(tmp_path_factory.mktemp("source") / "src", layers=3, experts=4, shards=3)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, source):
    out = tmp_path_factory.mktemp("whole") / "out"
    pack(source, out, OPTIONS)
    return tree(out)


def crash_at_rename(monkeypatch, count: int) -> None:
    """Stop before the count-th file gets its name; what is written by then stays, as after kill -9."""
    real, seen = Path.replace, [0]

    def replace(self: Path, target: Path) -> Path:
        seen[0] += 1
        if seen[0] == count:
            raise InterruptedPackError
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)


def test_stopped_before_every_single_rename(tmp_path, monkeypatch, source, whole):
    stops = 0
    for count in range(1, 40):
        out = tmp_path / f"out-{count}"
        with monkeypatch.context() as patch:
            crash_at_rename(patch, count)
            patch.setattr(Path, "unlink", lambda *_, **__: None)  # a killed process tidies nothing up
            try:
                pack(source, out, OPTIONS)
            except InterruptedPackError:
                stops += 1
            else:
                break
        with pytest.raises(PackageError, match="not a Tandem package"):
            read_manifest(out)
        pack(source, out, OPTIONS)
        assert tree(out) == whole
    assert stops > 15  # 3 layers, 4 shards' worth of files, 3 carried, config, manifest, and their journal records


def test_finished_layers_are_not_encoded_again(tmp_path, monkeypatch, source, whole):
    out = tmp_path / "out"
    real, written = pack_module.write_layer, []

    def write_layer(out, layer, *rest):
        if len(written) == 2:
            raise InterruptedPackError
        written.append(layer.layer)
        return real(out, layer, *rest)

    monkeypatch.setattr(pack_module, "write_layer", write_layer)
    with pytest.raises(InterruptedPackError):
        pack(source, out, OPTIONS)
    assert written == [0, 1]
    written.clear()
    pack(source, out, OPTIONS)
    assert written == [2]
    assert tree(out) == whole


def test_a_finished_layer_that_was_damaged_is_made_again(tmp_path, monkeypatch, source, whole):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(pack_module, "_place_files", lambda *_: (_ for _ in ()).throw(InterruptedPackError))
        with pytest.raises(InterruptedPackError):
            pack(source, out, OPTIONS)
    damaged = out / "experts" / "layer-00001.bin"
    data = bytearray(damaged.read_bytes())
    data[100] ^= 1
    damaged.write_bytes(data)
    (out / "experts" / "layer-00002.bin").unlink()
    pack(source, out, OPTIONS)
    assert tree(out) == whole


def test_stopped_between_the_manifest_and_the_end_of_the_journal(tmp_path, monkeypatch, source, whole):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "close", lambda _: (_ for _ in ()).throw(InterruptedPackError))
        with pytest.raises(InterruptedPackError):
            pack(source, out, OPTIONS)
    verify(out)
    pack(source, out, OPTIONS)
    assert tree(out) == whole


@pytest.mark.parametrize("change", ["fp4_top", "source", "default_fp4_top"])
def test_an_interrupted_pack_is_not_mixed_with_another(tmp_path, monkeypatch, change):
    source = checkpoints.qwen3_moe(tmp_path / "src", layers=2)
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        crash_at_rename(patch, 6)
        with pytest.raises(InterruptedPackError):
            pack(source, out, OPTIONS)
    options = OPTIONS
    if change == "fp4_top":
        options = PackOptions(codec="raw", fp4_top=3)
    elif change == "source":
        checkpoints.qwen3_moe(source, layers=2, seed=1)
    else:
        options = PackOptions(codec="raw", fp4_top=2, default_fp4_top=1)
    before = tree(out)
    with pytest.raises(UsageError, match="interrupted pack of another checkpoint or with other options"):
        pack(source, out, options)
    assert tree(out) == before
    pack(source, out, options, overwrite=True)
    verify(out)


def test_two_packs_into_one_folder(tmp_path, source):
    out = tmp_path / "out"
    out.mkdir()
    with locked(out):
        (out / ".pack" / "x").write_text("work of the other one")
        with pytest.raises(UsageError, match="another `tandem pack` is writing"):
            pack(source, out, OPTIONS)
        (out / ".pack" / "x").unlink()
    assert not out.exists()  # nothing was written under that lock
    pack(source, out, OPTIONS)


def test_the_lock_goes_with_its_process(tmp_path):
    out = tmp_path / "out"
    (out / ".pack").mkdir(parents=True)
    child = os.fork()
    if child == 0:
        descriptor = os.open(out / ".pack" / "lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os._exit(0)
    os.waitpid(child, 0)
    with locked(out):
        pass


@pytest.mark.parametrize("file", ["experts/layer-00001.bin", "model-00002-of-00003.safetensors", "tandem.json"])
def test_disk_full(tmp_path, monkeypatch, source, whole, file):
    out = tmp_path / "out"
    real = writer.HashedFile.write
    full = [True]

    def write(self, data):
        real(self, data)
        if full[0] and (out / f"{file}.part").exists() and self.bytes:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer.HashedFile, "write", write)
    with pytest.raises(PlanError, match=rf"{Path(file).name}: the disk is full; finished layers are kept"):
        pack(source, out, OPTIONS)
    assert not list(out.rglob("*.part"))
    with pytest.raises(PackageError):
        read_manifest(out)
    full[0] = False
    pack(source, out, OPTIONS)
    assert tree(out) == whole


def test_progress_counts_every_byte_once(tmp_path, source):
    class Count(Silent):
        total = done = 0

        def start(self, total_bytes: int) -> None:
            self.total = total_bytes

        def advance(self, done_bytes: int, what: str) -> None:  # noqa: ARG002
            self.done += done_bytes

    count = Count()
    pack(source, tmp_path / "out", OPTIONS, report=count)
    assert count.done == count.total > 0


@pytest.mark.full
def test_a_disk_that_really_fills_up(tmp_path, monkeypatch):
    """On a small file system of its own; the check before the start is switched off."""
    source = checkpoints.qwen3_moe(tmp_path / "src", layers=4, experts=16)
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("this process may not mount a file system")
    try:
        monkeypatch.setattr(pack_module, "_check_room", lambda *_: None)
        with pytest.raises(PlanError, match="the disk is full"):
            pack(source, disk / "out", OPTIONS)
        assert not list(disk.rglob("*.part"))
        assert list((disk / "out" / "experts").glob("*.bin"))
        with pytest.raises(PackageError):
            read_manifest(disk / "out")
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        pack(source, disk / "out", OPTIONS)
        verify(disk / "out")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def start_pack(source: Path, out: Path) -> subprocess.Popen[bytes]:
    code = (
        "import sys; from pathlib import Path; from tandem.package.pack import PackOptions, pack; "
        "pack(Path(sys.argv[1]), Path(sys.argv[2]), PackOptions(fp4_top=1))"
    )
    return subprocess.Popen([sys.executable, "-c", code, str(source), str(out)])


@pytest.mark.full
def test_kill_9_at_several_points(tmp_path):
    source = checkpoints.deepseek_fp4(tmp_path / "src", layers=7, experts=8, hidden=512, intermediate=128, shards=3)
    pack(source, tmp_path / "whole", PackOptions(fp4_top=1))
    want = tree(tmp_path / "whole")
    out = tmp_path / "out"
    kept_before: dict[str, int] = {}
    for layers_done in (0, 1, 3, 6):
        process = start_pack(source, out)
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if len(list((out / ".pack").glob("layer-*.json"))) >= layers_done and list((out / "experts").glob("*")):
                break
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
        with pytest.raises(PackageError):
            read_manifest(out)
        kept = {path.name: path.stat().st_mtime_ns for path in (out / "experts").glob("*.bin")}
        assert kept_before.items() <= kept.items()  # none was written twice
        kept_before = kept
    assert start_pack(source, out).wait(timeout=120) == 0
    assert tree(out) == want
    assert kept_before.items() <= {p.name: p.stat().st_mtime_ns for p in (out / "experts").glob("*.bin")}.items()
