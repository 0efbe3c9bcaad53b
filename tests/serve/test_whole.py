from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tandem import whole
from tandem.errors import PackageError
from tandem.package.manifest import FileEntry, Manifest, read_manifest
from tandem.whole import check_whole, file_sha256

CONTENT = b"0123456789abcdef"


@pytest.fixture
def package(make_package: Callable[..., Path]) -> tuple[Path, Manifest]:
    folder = make_package()
    (folder / "weights").write_bytes(CONTENT)
    entry = FileEntry(bytes=len(CONTENT), sha256=file_sha256(folder / "weights"), origin="copied")
    return folder, read_manifest(folder).model_copy(update={"files": {"weights": entry}})


def test_a_whole_package_passes(package: tuple[Path, Manifest]) -> None:
    check_whole(*package)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (CONTENT[:-1], r"15 bytes, the manifest says 16 \(-1\)"),
        (CONTENT[:-1] + b"F", "sha256 .* the manifest says"),
        (None, "missing"),
    ],
)
def test_damage_is_one_line(package: tuple[Path, Manifest], content: bytes | None, said: str) -> None:
    folder, manifest = package
    if content is None:
        (folder / "weights").unlink()
    else:
        (folder / "weights").write_bytes(content)
    with pytest.raises(PackageError, match=said) as caught:
        check_whole(folder, manifest)
    assert "\n" not in str(caught.value)


def test_a_large_package_is_not_hashed(package: tuple[Path, Manifest], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, manifest = package
    monkeypatch.setattr(whole, "HASH_BELOW_BYTES", 0)
    (folder / "weights").write_bytes(bytes(len(CONTENT)))
    check_whole(folder, manifest)


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "a/../../b"])
def test_a_name_that_leaves_the_package(package: tuple[Path, Manifest], name: str) -> None:
    folder, manifest = package
    entry = manifest.files["weights"]
    with pytest.raises(PackageError, match="not a file within the package"):
        check_whole(folder, manifest.model_copy(update={"files": {name: entry}}))
