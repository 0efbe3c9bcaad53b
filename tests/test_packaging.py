"""pyproject.toml, the folders and the versions say the same; nothing heavy or private is tracked."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tandem.versions import PYTHON_BELOW, PYTHON_MIN, TANDEM

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HOME = Path(__file__).resolve().parent.parent
TRACKED_BYTES_MAX = 16_000_000
# A home folder or a root's folder of somebody's machine; documentation may name /path/to and /tmp.
MACHINE_PATH = re.compile(r"(?<![\w.])/(home|Users|work|root|mnt|scratch)/[A-Za-z0-9_.-]+")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((HOME / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def tracked() -> list[Path]:
    answer = subprocess.run(["git", "ls-files", "-z"], cwd=HOME, capture_output=True, text=True, check=False)
    if answer.returncode:
        pytest.skip("not a git checkout")
    paths = [HOME / name for name in answer.stdout.split("\0") if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def test_the_package_list_is_every_folder_with_an_init(project: dict[str, Any]) -> None:
    listed = project["tool"]["setuptools"]["packages"]
    places = project["tool"]["setuptools"]["package-dir"]
    roots = {"tandem": "tandem", "tandem_evals": places["tandem_evals"], "tandem_tuner": places["tandem_tuner"]}
    found = {"tandem.shipped_profiles"}
    for name, folder in roots.items():
        for init in (HOME / folder).rglob("__init__.py"):
            inner = init.parent.relative_to(HOME / folder).parts
            found.add(".".join((name, *inner)))
    assert sorted(listed) == sorted(found)
    assert (HOME / places["tandem.shipped_profiles"] / "__init__.py").is_file()


def test_the_version_has_one_value(project: dict[str, Any]) -> None:
    assert project["project"]["version"] == TANDEM
    low, below = (".".join(map(str, version)) for version in (PYTHON_MIN, PYTHON_BELOW))
    assert project["project"]["requires-python"] == f">={low},<{below}"


def test_every_entry_point_resolves_to_a_function(project: dict[str, Any]) -> None:
    points = dict(project["project"]["scripts"])
    for group in project["project"]["entry-points"].values():
        points |= group
    for target in points.values():
        module, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(module), name)), target


def test_every_requirement_is_pinned() -> None:
    line = re.compile(r'^[A-Za-z0-9_.-]+==[A-Za-z0-9_.+!]+(; python_version (>=|<) "3\.11")?$')
    for path in (HOME / "requirements").glob("*.txt"):
        pins = [text for text in path.read_text().splitlines() if text and not text.startswith("#")]
        assert pins
        assert [text for text in pins if not line.match(text)] == [], path.name


def test_the_pins_satisfy_pyproject(project: dict[str, Any]) -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    for python in ("3.10", "3.11", "3.12"):
        for kind in ("cpu.txt", "cuda.txt"):
            pins = {}
            for name in (kind, "base.txt"):
                for text in (HOME / "requirements" / name).read_text().splitlines():
                    if text and not text.startswith("#"):
                        pin = Requirement(text)
                        if pin.marker is None or pin.marker.evaluate({"python_version": python}):
                            pins[canonicalize_name(pin.name)] = str(pin.specifier).removeprefix("==")
            extras = project["project"]["optional-dependencies"]
            wanted_texts = project["project"]["dependencies"] + (extras["gpu"] if kind == "cuda.txt" else [])
            for text in wanted_texts:
                wanted = Requirement(text)
                version = pins[canonicalize_name(wanted.name)]
                assert wanted.specifier.contains(version, prereleases=True), f"{text}: {version} ({kind}, {python})"


def test_the_full_tier_compiles_gpu_kernels_with_the_pins_of_cuda() -> None:
    cuda, nvrtc = (
        {line for line in (HOME / "requirements" / name).read_text().splitlines() if not line.startswith("#")}
        for name in ("cuda.txt", "nvrtc.txt")
    )
    assert nvrtc < cuda


def test_what_is_tracked_is_small(tracked: list[Path]) -> None:
    assert sum(path.stat().st_size for path in tracked) < TRACKED_BYTES_MAX


def test_no_path_of_a_machine_is_tracked(tracked: list[Path]) -> None:
    this = Path(__file__).resolve()
    found = []
    for path in tracked:
        data = path.read_bytes()
        if path == this or b"\0" in data[:4096]:
            continue
        text = data.decode(errors="replace")
        found += [f"{path.relative_to(HOME)}: {match[0]}" for match in MACHINE_PATH.finditer(text)]
    assert found == []
