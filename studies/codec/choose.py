"""The decision rule: among codes that lose no more than the best one within noise, the least predicted time a token.

Pure. The prediction is a floor of two devices that read and decode in parallel; nothing else of a step is in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from studies.codec.stats import Spread

EXPERTS = 40 * 384  # of DeepSeek-V4.1-Flash
PICKED = 240  # of a token, all layers
EXPERT_WEIGHTS = 3 * 5120 * 2304
RESERVED_GB = 10.0  # of a GPU's memory, for everything that is not routed experts
NOISE_SDS = 2.0
ASSUMED_GPU_FRACTION = 0.5  # of the copy rate, where no kernel was measured


class Box(NamedTuple):
    name: str
    avx512: bool
    cores: int
    ghz: float
    ram_gb_s: float
    gpu_gb: float
    gpu_gb_s: float


BOXES = (
    Box("8 AVX2 cores, 48 GB GPU", False, 8, 3.5, 205.0, 48.0, 900.0),
    Box("16 AVX-512 cores, 24 GB GPU", True, 16, 3.0, 80.0, 24.0, 1000.0),
    # the host is that of design.md, section 9: it computes what 129 GB do not hold
    Box("H200", True, 16, 3.0, 80.0, 139.0, 4300.0),
)


class Candidate(NamedTuple):
    name: str
    bits: float  # a weight, scales included
    loss: Spread  # over re-encodings
    avx2: float  # weights a cycle and core
    avx512: float
    gpu_fraction: float  # of the GPU's copy rate


class Prediction(NamedTuple):
    hit: float  # share of the picked experts in GPU memory: uniform routing, the pessimistic case
    gpu_ms: float
    memory_ms: float  # the host's reading
    core_ms: float  # the host's decoding

    @property
    def ms(self) -> float:
        return max(self.gpu_ms, self.memory_ms, self.core_ms)


class Choice(NamedTuple):
    noise: float  # NOISE_SDS pooled standard deviations of one re-encoding
    best: str  # least mean loss
    tied: tuple[str, ...]  # within `noise` of it
    ms: dict[str, float]  # geometric mean over the boxes, of every candidate
    chosen: str


def predict(box: Box, candidate: Candidate) -> Prediction:
    """Milliseconds of one token's routed experts."""
    expert_bytes = EXPERT_WEIGHTS * candidate.bits / 8
    hit = min(1.0, (box.gpu_gb - RESERVED_GB) * 1e9 / (EXPERTS * expert_bytes))
    missed = PICKED * (1 - hit)
    per_cycle = candidate.avx512 if box.avx512 else candidate.avx2
    return Prediction(
        hit,
        PICKED * hit * expert_bytes / (box.gpu_gb_s * 1e9 * candidate.gpu_fraction) * 1e3,
        missed * expert_bytes / (box.ram_gb_s * 1e9) * 1e3,
        missed * EXPERT_WEIGHTS / (box.cores * box.ghz * 1e9 * per_cycle) * 1e3,
    )


def choose(candidates: Sequence[Candidate], boxes: Sequence[Box] = BOXES) -> Choice:
    """ValueError when no candidate was encoded more than once: without repeats there is no noise to compare with."""
    variances = [candidate.loss.sd**2 for candidate in candidates if candidate.loss.n > 1]
    if not variances:
        raise ValueError("no candidate has more than one re-encoding; raise the repeats")
    noise = NOISE_SDS * math.sqrt(sum(variances) / len(variances))
    best = min(candidates, key=lambda candidate: candidate.loss.mean)
    tied = [candidate for candidate in candidates if candidate.loss.mean <= best.loss.mean + noise]
    ms = {
        candidate.name: math.exp(sum(math.log(predict(box, candidate).ms) for box in boxes) / len(boxes))
        for candidate in candidates
    }
    chosen = min(tied, key=lambda candidate: ms[candidate.name])
    return Choice(noise, best.name, tuple(candidate.name for candidate in tied), ms, chosen.name)
