"""Codecs by name and version, as a manifest names them."""

from __future__ import annotations

from collections.abc import Callable

from tandem.codec.base import ExpertCodec
from tandem.codec.fp4 import Fp4Codec
from tandem.codec.raw import DTYPES, RawCodec
from tandem.codec.sac_codec import SacCodec
from tandem.errors import PackageError
from tandem.package.manifest import CodecSpec, SectionName


def _raw(spec: CodecSpec) -> ExpertCodec:
    dtype = spec.params.get("dtype")
    for known in DTYPES:
        if dtype == known:
            return RawCodec(known)
    raise PackageError(f"codec 'raw' holds {dtype!r}; this build reads {', '.join(DTYPES)}")


_BUILDERS: dict[tuple[str, int], Callable[[CodecSpec], ExpertCodec]] = {
    ("sac", 1): lambda _: SacCodec(),
    ("fp4", 1): lambda _: Fp4Codec(),
    ("raw", 1): _raw,
}
_SECTIONS: dict[str, SectionName] = {"sac": "vq", "fp4": "fp4", "raw": "raw"}  # vq: 2-bit codes of any kind


def codec_for(section: SectionName, spec: CodecSpec) -> ExpertCodec:
    """The codec of a manifest's `section`. Raises PackageError: unknown name, another version, other parameters."""
    builder = _BUILDERS.get((spec.name, spec.version))
    if builder is None:
        known = ", ".join(f"{name} version {version}" for name, version in _BUILDERS)
        raise PackageError(
            f"section {section!r} needs codec {spec.name!r} version {spec.version}; this build has {known}: "
            "update Tandem or pack the checkpoint again"
        )
    if _SECTIONS[spec.name] != section:
        raise PackageError(f"section {section!r} names codec {spec.name!r}; pack the checkpoint again")
    codec = builder(spec)
    if codec.spec != spec:
        raise PackageError(f"codec {spec.name!r} has parameters {spec.params}; this build reads {codec.spec.params}")
    return codec
