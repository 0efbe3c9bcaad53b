from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem import paths, target
from tandem.errors import PackageError, UnsupportedError, UsageError
from tandem.package.manifest import read_manifest
from tandem.profile import Profile
from tandem.target import PackOptions, checkpoint_key, known_package, plan_target, remember, resolve_target


def checkpoint(folder: Path, weights: bytes = b"w") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_a_package_is_itself_and_is_remembered(make_package: Callable[..., Path]) -> None:
    package = make_package()
    found = resolve_target(str(package))
    assert found.path == package and not found.packed_now
    assert known_package(found.manifest_sha256) == package


@pytest.mark.parametrize(
    ("make", "kind", "said"),
    [
        (lambda p: p / "gone", UsageError, "no such folder, and not a hub id"),
        (lambda p: p, PackageError, r"neither a package \(tandem.json\) nor a checkpoint"),
    ],
)
def test_no_target(tmp_path: Path, make: Callable[[Path], Path], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        plan_target(str(make(tmp_path)))


def test_a_file_and_a_checkpoint_without_weights(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "m")
    with pytest.raises(UsageError, match="is a file"):
        plan_target(str(source / "config.json"))
    (source / "model.safetensors").unlink()
    with pytest.raises(PackageError, match="not complete"):
        plan_target(str(source))


def test_the_key_sees_content_options_and_config(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "m")
    first = checkpoint_key(source, PackOptions())
    os.utime(source / "model.safetensors", (1, 1))
    assert checkpoint_key(source, PackOptions()) == first
    assert checkpoint_key(source, PackOptions(fp4_top=3)) != first
    (source / "model.safetensors").write_bytes(b"x")
    assert checkpoint_key(source, PackOptions()) != first


def test_a_checkpoint_leads_to_a_package_in_the_state(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "m")
    plan = plan_target(str(source))
    assert plan.kind == "checkpoint" and not plan.ready and plan.package is not None
    assert plan.package.parent == paths.packages_dir() and plan.package.name.startswith("m-")


def test_a_refusal_comes_before_packing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: Any) -> None:
        raise UnsupportedError(f"no {config['model_type']}")

    monkeypatch.setattr(target, "_pack", lambda *_: pytest.fail("packed"))
    with pytest.raises(UnsupportedError, match="no qwen3_moe"):
        resolve_target(str(checkpoint(tmp_path / "m")), gate=refuse)
    assert not paths.packages_dir().exists()


def test_large_work_needs_yes_without_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "ASK_ABOVE_BYTES", 0)
    monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: PTH123, SIM115
    with pytest.raises(UsageError, match="add --yes"):
        resolve_target(str(checkpoint(tmp_path / "m")))


def test_offline_hub_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(PackageError, match="cannot fetch nobody/nothing from the hub") as caught:
        resolve_target("nobody/nothing")
    assert "\n" not in str(caught.value)


def test_revision_is_for_the_hub(make_package: Callable[..., Path]) -> None:
    with pytest.raises(UsageError, match="--revision is for a hub id"):
        resolve_target(str(make_package()), revision="main")


def test_no_target_takes_the_newest_profiles_package(
    make_package: Callable[..., Path], make_profile: Callable[..., Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "mini_model_dir", lambda: None)
    with pytest.raises(UsageError, match="no target"):
        plan_target(None, last_tuned=True)
    for month, name in ((1, "older"), (2, "newer")):
        package = make_package(name, default_fp4_top=month)
        sha256 = read_manifest(package).sha256
        remember(package, sha256)
        profile = make_profile(package_sha256=sha256, created_utc=f"2025-0{month}-01T00:00:00Z")
        profile.write(paths.profiles_dir() / f"{name}.json")
    plan = plan_target(None, last_tuned=True)
    assert plan.package == package and profile.id in plan.origin
    (package / "tandem.json").unlink()
    older = plan_target(None, last_tuned=True).package
    assert older is not None and older.name == "older"


def test_no_target_falls_back_to_the_mini_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mini = checkpoint(tmp_path / "model")
    monkeypatch.setattr(paths, "mini_model_dir", lambda: mini)
    plan = plan_target(None)
    assert plan.options == target.MINI_PACK and plan.origin == "the bundled mini model"
    assert plan.package is not None and plan.package.name.startswith("mini-")
    assert plan_target(str(mini)).package == plan.package
