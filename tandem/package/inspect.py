"""What is in a package: numbers for people and programs, from the manifest alone."""

from __future__ import annotations

from typing import NamedTuple

from tandem.package.manifest import LayerEntry, Manifest
from tandem.package.reader import Package

TOP_SHARE = 0.1  # the routing skew is told as the share of picks that the most routed 10 % of the experts take


class SectionSummary(NamedTuple):
    """One section over all layers."""

    name: str
    codec: str  # with its version
    experts: int
    bytes: int  # padding included
    bits_per_weight: float  # of the first layer's records, padding excluded


class Shape(NamedTuple):
    """Layers of the same geometry."""

    layers: tuple[int, ...]
    drafter: bool
    experts: int
    top_k: int
    hidden: int
    intermediate: int


def sections(package: Package) -> list[SectionSummary]:
    first = package.manifest.layers[0]
    found: list[SectionSummary] = []
    for name, codec in package.codecs.items():
        held = [entry.sections[name] for entry in package.manifest.layers]
        found.append(
            SectionSummary(
                name=name,
                codec=f"{codec.spec.name} v{codec.spec.version}",
                experts=sum(len(section.experts) for section in held),
                bytes=sum(len(section.experts) * section.stride for section in held),
                bits_per_weight=codec.bits_per_weight(first.hidden, first.intermediate),
            )
        )
    return found


def shapes(manifest: Manifest) -> list[Shape]:
    groups: dict[tuple[bool, int, int, int, int], list[int]] = {}
    for entry in manifest.layers:
        key = (entry.drafter, entry.num_experts, entry.top_k, entry.hidden, entry.intermediate)
        groups.setdefault(key, []).append(entry.layer)
    return [Shape(tuple(layers), *key) for key, layers in groups.items()]


def top_share(entry: LayerEntry) -> float | None:
    """Share of the layer's picks that its most routed tenth of experts takes; None without a trace."""
    if entry.routing is None or not sum(entry.routing):
        return None
    most = max(1, round(TOP_SHARE * entry.num_experts))
    return sum(sorted(entry.routing, reverse=True)[:most]) / sum(entry.routing)


def mean_top_share(manifest: Manifest) -> float | None:
    shares = [share for entry in manifest.layers if (share := top_share(entry)) is not None]
    return sum(shares) / len(shares) if shares else None


def summary(package: Package) -> dict[str, object]:
    """The whole screen as JSON values."""
    manifest = package.manifest
    return {
        "format": manifest.format,
        "tandem": manifest.tandem,
        "manifest_sha256": manifest.sha256,
        "source": manifest.source.model_dump(mode="json"),
        "shapes": [shape._asdict() for shape in shapes(manifest)],
        "sections": [section._asdict() for section in sections(package)],
        "fp4": manifest.fp4.model_dump(mode="json"),
        "default_fp4_top": manifest.default_fp4_top,
        "routing": {"origin": manifest.routing_origin, "mean_top_tenth_share": mean_top_share(manifest)},
        "experts_bytes": sum(entry.bytes for entry in manifest.layers),
        "files_bytes": sum(entry.bytes for entry in manifest.files.values()),
        "files": {name: entry.model_dump(mode="json") for name, entry in manifest.files.items()},
    }


def lines(package: Package) -> list[str]:
    """The screen."""
    manifest = package.manifest
    source, fp4 = manifest.source, manifest.fp4
    out = [
        f"{package.path}: package format {manifest.format}, packed by Tandem {manifest.tandem}",
        f"manifest  {manifest.sha256}",
        f"source    {source.name} {source.revision or '(local folder)'}, {source.architecture}, "
        f"experts in {source.expert_format}",
    ]
    for shape in shapes(manifest):
        kind = "drafter" if shape.drafter else "target"
        span = f"{shape.layers[0]}..{shape.layers[-1]}" if len(shape.layers) > 1 else f"{shape.layers[0]}"
        out.append(
            f"layers    {kind} {span} ({len(shape.layers)}): {shape.experts} experts, top {shape.top_k}, "
            f"hidden {shape.hidden}, intermediate {shape.intermediate}"
        )
    for section in sections(package):
        out.append(
            f"section   {section.codec}: {section.experts} experts, {_size(section.bytes)}, "
            f"{section.bits_per_weight:.4f} bits a weight"
        )
    if fp4.max_top:
        made = "rounded from the source" if fp4.derived else "the source's own, bit for bit"
        out.append(
            f"fp4       top {fp4.max_top} a layer by {fp4.order}, {made}; a server uses {manifest.default_fp4_top}"
        )
    share = mean_top_share(manifest)
    if share is not None:
        out.append(f"routing   {manifest.routing_origin}: the top tenth of the experts takes {share:.1%} of the picks")
    kinds = {
        origin: [entry for entry in manifest.files.values() if entry.origin == origin]
        for origin in ("linked", "copied", "rewritten")
    }
    out.append(
        "files     "
        + ", ".join(
            f"{len(entries)} {origin} ({_size(sum(entry.bytes for entry in entries))})"
            for origin, entries in kinds.items()
            if entries
        )
    )
    return out


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"
