"""Which section each expert comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.errors import PackageError, UsageError
from tandem.package.manifest import LayerEntry, Manifest, Section, read_manifest
from tandem.placement import effective_fp4_top, place
from tests.engine.packages import FP4_ORDER, make_package


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return read_manifest(make_package(tmp_path / "package"))


@pytest.mark.parametrize("top", [0, 1, 3])
def test_the_first_of_the_fp4_section_come_from_it(manifest: Manifest, top: int) -> None:
    placement = place(manifest.layers[0], top)
    chosen = [expert for expert, section in enumerate(placement.sections) if section == "fp4"]
    assert sorted(FP4_ORDER[:top]) == chosen
    assert [placement.records[expert] for expert in FP4_ORDER[:top]] == list(range(top))
    assert placement.used == (("fp4", "vq") if top else ("vq",))


def test_a_package_of_fp4_alone(manifest: Manifest) -> None:
    section = Section(offset=0, stride=4096, record_bytes=10, experts=(5, 0, 1, 2, 3, 4))
    entry = manifest.layers[0].model_copy(update={"sections": {"fp4": section}})
    assert place(entry, 0).used == ("fp4",)
    assert place(entry, 0).records[5] == 0


def test_an_expert_that_no_section_holds(manifest: Manifest) -> None:
    entry: LayerEntry = manifest.layers[0].model_copy(update={"sections": {"fp4": manifest.layers[0].sections["fp4"]}})
    with pytest.raises(PackageError, match=r"3 of 6 experts are in no section \(the first is 0\)"):
        place(entry, 3)


def test_fp4_top_of_the_package_and_beyond(manifest: Manifest) -> None:
    assert effective_fp4_top(manifest, None) == 1
    assert effective_fp4_top(manifest, 0) == 0
    with pytest.raises(UsageError, match="fp4_top=4 > 3"):
        effective_fp4_top(manifest, 4)
