from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem import paths
from tandem.errors import ProfileError, UsageError
from tandem.profile import Profile, engine_config, find_profile, load_profile, match, new_profile, require_match

PACKAGE = "a" * 64
Make = Callable[..., Profile]


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    return path


@pytest.fixture
def file(tmp_path: Path, make_profile: Make) -> Path:
    path = tmp_path / "p.json"
    make_profile().write(path)
    return path


def test_a_written_profile_reads_back_equal_and_its_id_names_its_content(file: Path, make_profile: Make) -> None:
    profile = load_profile(file)
    assert profile == make_profile()
    assert profile.id == profile.sha256[:12]
    assert json.loads(file.read_text())["schema"] == "tandem/profile/1"


def test_hash_ignores_key_order_and_sees_every_change(file: Path, make_profile: Make) -> None:
    document = json.loads(file.read_text())
    file.write_text(json.dumps(dict(reversed(document.items()))))
    assert load_profile(file).sha256 == make_profile().sha256
    assert make_profile(knobs={"fp4_top": 5}).sha256 != make_profile().sha256
    assert make_profile(created_utc="2025-01-02T03:04:06Z").sha256 != make_profile().sha256


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.update(colour="red"), "unknown key 'colour'; top-level keys are base, created_utc"),
        (lambda d: d["knobs"].update(cache_gib=3), "the settings are fp4_top, cpu_threads, reserve_cores"),
        (lambda d: d["knobs"].update(pinning="hard"), "pinning='hard' is not one of none, compact, spread"),
        (lambda d: d["knobs"].update(fp4_top=-1), "fp4_top=-1 is not a whole number"),
        (lambda d: d["evidence"].update(status="good"), "'confirmed', 'provisional' or 'shipped'"),
        (lambda d: d.update(schema="tandem/profile/9"), "schema: Input should be 'tandem/profile/1'"),
        (lambda d: d.pop("machine"), "machine: Field required"),
        (lambda d: d["knobs"].update(fp4_top=5), "the file was changed after it was written"),
        (lambda d: d.update(package_sha256="12"), "package_sha256"),
    ],
)
def test_a_bad_profile_is_one_line(file: Path, change: Callable[[dict[str, Any]], None], said: str) -> None:
    with pytest.raises(ProfileError) as caught:
        load_profile(edit(file, change))
    assert said in str(caught.value) and str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_cut_short_or_missing_is_one_line(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ProfileError, match="Invalid JSON"):
        load_profile(file)
    with pytest.raises(ProfileError, match="No such file"):
        load_profile(file.with_name("gone.json"))


def test_new_profile_refuses_what_load_would() -> None:
    class Nowhere:
        hard: dict[str, Any] = {}  # noqa: RUF012
        soft: dict[str, Any] = {}  # noqa: RUF012

    with pytest.raises(ProfileError, match="unknown setting 'speed'"):
        new_profile(machine=Nowhere(), package_sha256=PACKAGE, knobs={"speed": 1}, tandem="t", vllm=None)


def test_match_tells_hard_from_soft(box: Any, make_profile: Make) -> None:
    profile = make_profile()
    assert match(profile, box, PACKAGE).strict
    box.soft["driver"] = "595"
    soft = match(profile, box, PACKAGE)
    assert soft.usable and not soft.strict and str(soft.soft[0]) == "driver none != 595"
    box.hard["cpu"] = "CPU B"
    assert not match(profile, box, PACKAGE).usable
    with pytest.raises(ProfileError) as caught:
        require_match(profile, "p.json", box, PACKAGE)
    said = "p.json: profile of another box: cpu CPU A != CPU B; run tandem-tune, or --profile none"
    assert str(caught.value) == said


def test_another_package_is_said_as_such(box: Any, make_profile: Make) -> None:
    with pytest.raises(ProfileError, match="profile of another package: package sha256 aaaaaaaaaaaa != bbbbbbbbbbbb"):
        require_match(make_profile(), "p.json", box, "b" * 64)


def test_a_fact_that_one_side_lacks_is_a_difference(box: Any, make_profile: Make) -> None:
    profile = make_profile()
    box.hard["numa"] = 2
    assert [d.key for d in match(profile, box, PACKAGE).hard] == ["numa"]


def test_search_order_and_choice(box: Any, make_profile: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def put(folder: Path, name: str, **changed: Any) -> Profile:
        profile = make_profile(**changed)
        profile.write(folder / f"{name}.json")
        return profile

    state = paths.profiles_dir()
    assert find_profile(box, PACKAGE, [state]).profile is None
    old = put(state, "old", created_utc="2025-01-01T00:00:00Z")
    assert find_profile(box, PACKAGE).profile == old
    new = put(state, "new", created_utc="2025-02-01T00:00:00Z", knobs={"fp4_top": 1})
    put(state, "newest", created_utc="2025-03-01T00:00:00Z", status="provisional")
    put(state, "foreign", package_sha256="c" * 64, created_utc="2025-04-01T00:00:00Z")
    (state / "broken.json").write_text("{")
    found = find_profile(box, PACKAGE)
    assert found.profile == new and found.path == state / "new.json"
    assert found.others == 1 and len(found.skipped) == 1 and "broken.json" in found.skipped[0]
    monkeypatch.setenv("TANDEM_PROFILE_DIR", str(tmp_path / "mine"))
    mine = put(tmp_path / "mine", "m", created_utc="2024-01-01T00:00:00Z")
    assert find_profile(box, PACKAGE).profile == mine


def test_engine_reads_the_file_that_additional_config_names(file: Path) -> None:
    resolved, profile = engine_config({"tandem": {"profile": str(file)}, "other": 1})
    assert resolved.config.fp4_top == 4 and resolved.config.pinning == "compact"
    assert resolved.origins["fp4_top"] == "profile" and resolved.origins["smt"] == "default"
    assert profile is not None and profile.id == load_profile(file).id


def test_engine_has_defaults_without_a_profile() -> None:
    for stated in (None, {}, {"other": 1}, {"tandem": {}}):
        resolved, profile = engine_config(stated)
        assert profile is None and set(resolved.origins.values()) == {"default"}


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({"tandem": {"fp4_top": 3}}, "unknown key tandem.fp4_top; the only key is profile"),
        ({"tandem": "p.json"}, "not an object"),
        ({"tandem": {"profile": 3}}, "is not a path"),
    ],
)
def test_engine_refuses_other_keys(stated: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        engine_config(stated)


def test_shipped_profiles_are_valid() -> None:
    for path in paths.shipped_profiles_dir().glob("*.json"):
        load_profile(path)
