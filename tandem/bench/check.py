"""A kernel against the reference before it is timed."""

from __future__ import annotations

from tandem.codec.tiles import Kind
from tandem.kernels.moe import native
from tandem.kernels.moe.check import check_engine


def check_kernel(kernel: str, kind: Kind) -> float:
    """On two threads of its own -> the worst relative RMS. Raises CheckError."""
    engine = native.Engine([(), ()], kernel=kernel, spin_ms=1)
    try:
        return check_engine(engine, kind)
    finally:
        engine.close()
