"""Bytes, itemised: what has to lie in RAM and VRAM, and by how much it does not fit. Pure arithmetic.

Sizes are bytes. People read GiB (2^30); GB (10^9) appears only where a source of a figure uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tandem.errors import PlanError, UnsupportedError
from tandem.package.manifest import Manifest

GIB = 1 << 30
VQ_BITS = 2.125  # of the shipped code, scales included: 9.4 MB for one expert of V4.1-Flash
FP4_BITS = 4.25  # e2m1 and one e8m0 scale per 32 weights
FP8_BLOCK_COLUMNS = 32  # Engram rows are e4m3 with one e8m0 scale per 32 columns (vLLM 0.31, deepseek_v41 engram)
SYSTEM_BYTES = 6 * GIB  # vLLM's processes (0.5 + 0.5 + 2.5 GiB measured on CPU) and the operating system
DENSE_BYTES = 8_200_000_000  # of V4.1-Flash: all that is no routed expert and no Engram table (read once a step)
RAM_FIX = "add RAM, raise the memory limit, or take a lower --fp4-top"
VRAM_FIX = "take a GPU with more memory, or a lower --max-model-len"


class Item(NamedTuple):
    """One line of a plan."""

    name: str
    bytes: int
    why: str  # where the figure comes from


@dataclass(frozen=True, slots=True)
class Plan:
    """Items that have to lie in `place` together, and what is there."""

    place: str  # RAM, cuda:0, ...
    items: tuple[Item, ...]
    limit_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(item.bytes for item in self.items)

    @property
    def short_bytes(self) -> int:
        """How much is missing; 0 when it fits."""
        return max(0, self.total_bytes - self.limit_bytes)


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the size of a Mixture-of-Experts model follows from, read from its config.json."""

    layers: int
    experts: int  # routed, a layer
    top_k: int
    drafter_layers: int
    drafter_experts: int  # routed, a drafter layer
    hidden: int
    intermediate: int
    engram_rows: int  # of all n-gram tables together; 0: the model has none
    engram_columns: int

    @property
    def expert_weights(self) -> int:
        """Weights of one routed expert: gate, up and down."""
        return 3 * self.hidden * self.intermediate

    @property
    def routed_weights(self) -> int:
        """Of the target's routed experts; the drafter's are apart."""
        return self.layers * self.experts * self.expert_weights

    @property
    def drafter_weights(self) -> int:
        return self.drafter_layers * self.drafter_experts * self.expert_weights

    @property
    def engram_bytes(self) -> int:
        """The tables as shipped: one byte a column and one scale byte per 32 columns."""
        return self.engram_rows * (self.engram_columns + self.engram_columns // FP8_BLOCK_COLUMNS)

    @property
    def token_weights(self) -> int:
        """Routed weights that one decoded token reads."""
        return self.layers * self.top_k * self.expert_weights


# deepseek-ai's config.json of V4.1-Flash: what doctor plans with when it is shown no checkpoint.
V41_FLASH = Geometry(
    layers=40,
    experts=384,
    top_k=6,
    drafter_layers=3,
    drafter_experts=128,
    hidden=5120,
    intermediate=2304,
    engram_rows=384_006_168 + 384_016_682,
    engram_columns=256,
)


def geometry(config: Mapping[str, Any], where: str) -> Geometry:
    """Read a DeepSeek-V4.1 config.json (nested under text_config, or flat). Raises UnsupportedError: a missing key."""
    text = config.get("text_config", config)

    def need(key: str) -> int:
        value = text.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise UnsupportedError(f"{where}: no whole number {key!r}: not a DeepSeek-V4.1 config this build knows")
        return value

    tables: Iterable[int] = text.get("engram_num_embeddings") or ()
    experts = need("n_routed_experts")
    return Geometry(
        layers=need("num_hidden_layers"),
        experts=experts,
        top_k=need("num_experts_per_tok"),
        drafter_layers=text.get("num_nextn_predict_layers", 0),
        drafter_experts=text.get("dspark_n_routed_experts", experts),
        hidden=need("hidden_size"),
        intermediate=need("moe_intermediate_size"),
        engram_rows=sum(tables),
        engram_columns=need("engram_head_dim") if tables else 0,
    )


def code_bytes(weights: int, bits: float) -> int:
    return round(weights * bits / 8)


def v41_items(shape: Geometry, fp4_top: int = 0) -> tuple[Item, ...]:
    """What V4.1 keeps in RAM under Tandem. `fp4_top`: experts a layer that are held in FP4 as well."""
    vq = code_bytes(shape.routed_weights + shape.drafter_weights, VQ_BITS)
    fp4 = code_bytes(shape.layers * min(fp4_top, shape.experts) * shape.expert_weights, FP4_BITS)
    items = [Item("expert codes", vq, f"{shape.layers} x {shape.experts} experts and the drafter's at {VQ_BITS} bits")]
    if fp4:
        items.append(Item("FP4 experts", fp4, f"{shape.layers} x {min(fp4_top, shape.experts)} at {FP4_BITS} bits"))
    if shape.engram_bytes:
        why = f"{shape.engram_rows} rows of {shape.engram_columns} fp8 and their scales; vLLM pins them"
        items.append(Item("Engram tables", shape.engram_bytes, why))
    items.append(Item("system", SYSTEM_BYTES, "vLLM's processes and the operating system"))
    return tuple(items)


def v41_vram_items(kv_bytes: int = 0) -> tuple[Item, ...]:
    """What V4.1 needs on the GPU while its experts are computed on the CPU."""
    items = (
        Item("dense part", DENSE_BYTES, "attention, shared experts, embeddings, head"),
        Item("runtime", 2 * GIB, "CUDA context, activations, kernels' workspaces"),
        Item("KV cache", kv_bytes, "as asked for"),
    )
    return tuple(item for item in items if item.bytes)


def package_items(manifest: Manifest, fp4_top: int | None = None) -> tuple[Item, ...]:
    """What a package keeps in RAM: of the experts held twice, the record that this boot uses."""
    top = manifest.default_fp4_top if fp4_top is None else fp4_top
    totals = {"vq": 0, "fp4": 0, "raw": 0}
    for layer in manifest.layers:
        fp4 = layer.sections.get("fp4")
        used = set(fp4.experts[:top]) if fp4 else set()
        if fp4:
            totals["fp4"] += len(used) * fp4.stride
        for name, section in layer.sections.items():
            if name != "fp4":
                totals[name] += sum(expert not in used for expert in section.experts) * section.stride
    names = {"vq": "expert codes", "fp4": f"FP4 experts (top {top})", "raw": "raw experts"}
    held = [Item(names[name], size, "the manifest's records") for name, size in totals.items() if size]
    return (*held, Item("system", SYSTEM_BYTES, "vLLM's processes and the operating system"))


def ram_limit(total_bytes: int, cgroup_bytes: int | None, ram_gib: float | None = None) -> int:
    """min(MemTotal, memory.max, --ram-gib)."""
    limits = [total_bytes, cgroup_bytes, None if ram_gib is None else int(ram_gib * GIB)]
    return min(limit for limit in limits if limit is not None)


def ram_plan(items: Iterable[Item], limit_bytes: int) -> Plan:
    """Raises PlanError with every item and what is short."""
    return _fitting(
        Plan("RAM", tuple(items), limit_bytes), "add RAM, raise the memory limit, or take a lower --fp4-top"
    )


def vram_plan(items: Iterable[Item], limit_bytes: int, device: str) -> Plan:
    """Raises PlanError with every item and what is short."""
    return _fitting(
        Plan(device, tuple(items), limit_bytes), "lower --max-model-len or --gpu-memory-utilization's share"
    )


def gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB"


def _fitting(plan: Plan, fix: str) -> Plan:
    if plan.short_bytes:
        terms = " + ".join(f"{item.name} {item.bytes / GIB:.1f}" for item in plan.items)
        raise PlanError(
            f"{terms} = {gib(plan.total_bytes)} > {gib(plan.limit_bytes)} of {plan.place} "
            f"(short {gib(plan.short_bytes)}); {fix}"
        )
    return plan
