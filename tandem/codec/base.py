"""What a codec of expert weights is. Three exist: `sac` (2-bit codes), `fp4` (e2m1 + e8m0), `raw` (tests)."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from tandem.package.manifest import CodecSpec


class Part(NamedTuple):
    """A contiguous run of bytes inside an expert record."""

    name: str
    offset: int  # bytes from the record's start; a multiple of PANEL_ALIGN_BYTES
    bytes: int


class RecordLayout(NamedTuple):
    """Where the parts of one expert's record lie."""

    parts: tuple[Part, ...]
    record_bytes: int  # without the padding to the stride


class ExpertWeights(NamedTuple):
    """Decoded experts, sliced for one tensor-parallel rank. N experts, H hidden, I intermediate of this rank."""

    w13: torch.Tensor  # [N, 2 * I, H]; rows 0..I-1 are w1 (gate), I..2I-1 are w3 (up)
    w2: torch.Tensor  # [N, H, I]


class ExpertCodec(Protocol):
    """Encode and decode whole experts. Implementations are stateless, deterministic, and name their version."""

    @property
    def spec(self) -> CodecSpec: ...

    def bits_per_weight(self, hidden: int, intermediate: int) -> float:
        """Bits a weight of a record, scales included, alignment padding excluded."""
        ...

    def layout(self, hidden: int, intermediate: int) -> RecordLayout:
        """The record's layout. Raises UnsupportedError when a dimension does not fit the codec."""
        ...

    def encode(self, w1: torch.Tensor, w2: torch.Tensor, w3: torch.Tensor) -> torch.Tensor:
        """w1, w3: [N, I, H], w2: [N, H, I], any float dtype -> records [N, record_bytes] uint8."""
        ...

    def decode(
        self,
        records: torch.Tensor,
        hidden: int,
        intermediate: int,
        *,
        dtype: torch.dtype,
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> ExpertWeights:
        """records: [N, >= record_bytes] uint8 -> weights of rank `tp_rank`; `intermediate` is the whole model's."""
        ...
