"""Bytes of V4.1-Flash and of packages, and the line that says how much is short."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.errors import PlanError, UnsupportedError
from tandem.package.manifest import CodecSpec, Fp4, LayerEntry, Manifest, Section, Source
from tandem.plan import (
    GIB,
    V41_FLASH,
    Item,
    code_bytes,
    geometry,
    package_items,
    ram_limit,
    ram_plan,
    v41_items,
    vram_plan,
)
from tandem.versions import PACKAGE_FORMAT

CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v41",
    "text_config": {
        "num_hidden_layers": 40,
        "n_routed_experts": 384,
        "num_experts_per_tok": 6,
        "num_nextn_predict_layers": 3,
        "dspark_n_routed_experts": 128,
        "hidden_size": 5120,
        "moe_intermediate_size": 2304,
        "engram_num_embeddings": [384006168, 384016682],
        "engram_head_dim": 256,
    },
}


def test_the_built_in_geometry_is_what_the_config_says() -> None:
    assert geometry(CONFIG, "config.json") == V41_FLASH
    assert geometry(CONFIG["text_config"], "config.json") == V41_FLASH


def test_v41_flash_sizes_are_the_published_ones() -> None:
    assert V41_FLASH.expert_weights == 35_389_440
    assert code_bytes(V41_FLASH.routed_weights, 2.1) / 1e9 == pytest.approx(142.7, abs=0.05)
    assert code_bytes(V41_FLASH.routed_weights, 4.25) / 1e9 == pytest.approx(288.8, abs=0.05)
    assert code_bytes(V41_FLASH.token_weights, 2.1) / 1e9 == pytest.approx(2.23, abs=0.005)
    assert V41_FLASH.engram_bytes / 1e9 == pytest.approx(202.8, abs=0.05)


def test_a_config_without_a_size_is_refused_by_name() -> None:
    text = {key: value for key, value in CONFIG["text_config"].items() if key != "hidden_size"}
    with pytest.raises(UnsupportedError, match="hidden_size"):
        geometry({"text_config": text}, "config.json")


def test_fp4_adds_a_line_and_engram_is_always_there() -> None:
    assert [item.name for item in v41_items(V41_FLASH)] == ["expert codes", "Engram tables", "system"]
    more = {item.name: item.bytes for item in v41_items(V41_FLASH, fp4_top=24)}
    assert more["FP4 experts"] == 40 * 24 * V41_FLASH.expert_weights * 17 // 32


def test_a_plan_that_does_not_fit_says_by_how_much() -> None:
    items = [Item("codes", 10 * GIB, ""), Item("system", 2 * GIB, "")]
    assert ram_plan(items, 12 * GIB).short_bytes == 0
    line = r"^codes 10.0 \+ system 2.0 = 12.0 GiB > 9.5 GiB of RAM \(short 2.5 GiB\); add RAM"
    with pytest.raises(PlanError, match=line):
        ram_plan(items, 9 * GIB + GIB // 2)
    with pytest.raises(PlanError, match="of cuda:1"):
        vram_plan(items, GIB, "cuda:1")


def test_the_limit_is_the_smallest_that_is_stated() -> None:
    assert ram_limit(64 * GIB, None) == 64 * GIB
    assert ram_limit(64 * GIB, 32 * GIB) == 32 * GIB
    assert ram_limit(64 * GIB, 32 * GIB, ram_gib=1.5) == 3 * GIB // 2


def manifest() -> Manifest:
    """One layer of four experts: all in codes (8 KiB apart), experts 3 and 1 in FP4 too (16 KiB apart)."""
    sections: dict[Any, Section] = {
        "vq": Section(offset=0, stride=8192, record_bytes=8000, experts=(0, 1, 2, 3)),
        "fp4": Section(offset=32768, stride=16384, record_bytes=16000, experts=(3, 1)),
    }
    layer = LayerEntry(
        layer=0, drafter=False, num_experts=4, top_k=2, hidden=64, intermediate=64, file="experts/0", bytes=65536,
        sha256="0", sections=sections, routing=None,
    )  # fmt: skip
    source = Source(name="x", revision=None, config_sha256="0", architecture="X", expert_format="bf16")
    spec = CodecSpec(name="x", version=0, params={})
    return Manifest(
        format=PACKAGE_FORMAT, tandem="0", codecs={"vq": spec, "fp4": spec},
        fp4=Fp4(max_top=2, derived=True, order="routing"),
        default_fp4_top=1, source=source, routing_origin=None, layers=(layer,), files={},
    )  # fmt: skip


@pytest.mark.parametrize(("top", "codes", "fp4"), [(0, 4, 0), (None, 3, 1), (2, 2, 2)])
def test_a_package_counts_the_record_that_a_boot_uses(top: int | None, codes: int, fp4: int) -> None:
    sizes = {item.name.partition(" (")[0]: item.bytes for item in package_items(manifest(), top)}
    assert sizes.get("expert codes", 0) == codes * 8192
    assert sizes.get("FP4 experts", 0) == fp4 * 16384
