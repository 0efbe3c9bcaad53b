"""What this build can do. The tuner proposes nothing else, and docs/engine.md prints this."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Each field lists what exists in this build, not what is planned."""

    modes: tuple[str, ...]  # design: single, tp, helper, resident
    expert_devices: tuple[str, ...]  # where routed experts are computed
    cuda_graphs: bool  # decode may be captured in FULL CUDA graphs
    live_retune: bool  # POST /tandem/retune
    knobs: tuple[str, ...]  # settings that the tuner may search


def capabilities() -> Capabilities:
    """The capabilities of this build. `single` and tensor parallelism on CPU; experts on the CPU only."""
    return Capabilities(
        modes=("single", "tp-cpu"),
        expert_devices=("cpu",),
        cuda_graphs=False,
        live_retune=False,
        knobs=("fp4_top", "cpu_threads", "pinning"),
    )
