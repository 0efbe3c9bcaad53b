"""The GPU kernels against `ref.py` on experts of random codes: before a benchmark, at boot, and in tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tandem.codec.tiles import Kind, tile_record
from tandem.errors import CheckError
from tandem.kernels.moe.check import HIDDEN, INNER, RMS_MAX, SWIGLU, decode_record, random_record
from tandem.kernels.moe.gpu import KINDS, GpuLayer, Workspace, moe_gpu
from tandem.kernels.moe.ref import Swiglu, moe_ref, relative_rms

RECORD_ALIGN_BYTES = 256
PICKED = 2
EXPERTS = 4
TOKENS = (1, 2, 8, 17)  # each of gpu.VARIANTS, experts with few and with many rows, more rows than one item holds
POISON = 0xFF  # every float of such bytes is a NaN, every integer -1


class GpuExperts(NamedTuple):
    """A layer with random codes on a device, and its decoded weights here."""

    layer: GpuLayer
    memory: torch.Tensor  # the records
    w13: torch.Tensor  # [E, 2 I, H] f32
    w2: torch.Tensor  # [E, H, I] f32


def random_experts(
    kinds: Sequence[Kind],
    hidden: int,
    inner: int,
    swiglu: Swiglu,
    device: torch.device,
    seed: int = 7,
    *,
    weight_on_input: bool = False,
    scales: tuple[int, int] | None = None,
    base: float = 0.02,
) -> GpuExperts:
    """One expert for each of `kinds`. scales: the range of the scale bytes, as `random_record`."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    layouts = {kind: tile_record(kind, hidden, inner) for kind in sorted(set(kinds))}
    records = [random_record(layouts[kind], generator, scales, base) for kind in kinds]
    decoded = [decode_record(record, layouts[kind], hidden, inner) for kind, record in zip(kinds, records, strict=True)]
    memory, addresses = upload(records, device)
    codes = torch.tensor([KINDS[kind] for kind in kinds], dtype=torch.uint8, device=device)
    layer = GpuLayer(hidden, inner, list(layouts.values()), addresses, codes, swiglu, weight_on_input=weight_on_input)
    return GpuExperts(layer, memory, torch.stack([w13 for w13, _ in decoded]), torch.stack([w2 for _, w2 in decoded]))


def upload(records: Sequence[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Records [bytes] uint8 -> one block of device memory, and each record's address in it [E] int64 there."""
    starts = [0]
    for record in records:
        starts.append(starts[-1] + -(-record.numel() // RECORD_ALIGN_BYTES) * RECORD_ALIGN_BYTES)
    memory = torch.zeros(starts[-1], dtype=torch.uint8, device=device)
    for start, record in zip(starts, records, strict=False):
        memory[start : start + record.numel()].copy_(record)
    addresses = torch.tensor(starts[:-1], dtype=torch.int64, device=device) + memory.data_ptr()
    return memory, addresses


def poisoned(layer: GpuLayer, tokens: int, picked: int, device: torch.device) -> Workspace:
    """A workspace in which nothing that was not written can be read unnoticed."""
    workspace = Workspace(layer.hidden, layer.inner, tokens, picked, device)
    poison(workspace)
    return workspace


def poison(workspace: Workspace) -> None:
    for value in vars(workspace).values():
        for tensor in value if isinstance(value, list) else [value]:
            if isinstance(tensor, torch.Tensor):
                tensor.fill_(POISON)


def compute(
    layer: GpuLayer, workspace: Workspace, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """x [T, H], weights [T, K] f32, ids [T, K] int32, all here -> y [T, H] here, over a NaN-poisoned output."""
    device = layer.records.device
    y = torch.full_like(x, float("nan"), device=device)
    moe_gpu(layer, workspace, x.to(device), weights.to(device), ids.to(device), y)
    return y.cpu()


def check_kernels(device: torch.device, kinds: Sequence[Kind]) -> float:
    """A layer whose experts have `kinds` in turn, in f32 and bf16, twice each -> the worst relative RMS in f32.

    Everything that the kernels write is poisoned first. Raises CheckError, which names kernels, device and error, for
    a wrong result, one that does not repeat bit for bit, and a launch that fails; UnsupportedError where the kernels do
    not load.
    """
    with torch.cuda.device(device):
        return _check(device, kinds)


def _check(device: torch.device, kinds: Sequence[Kind]) -> float:
    generator = torch.Generator(device="cpu").manual_seed(11)
    of_experts = [kinds[expert % len(kinds)] for expert in range(EXPERTS)]
    experts = random_experts(of_experts, HIDDEN, INNER, SWIGLU, device)
    name = f"GPU kernels ffn, {'+'.join(kinds)}, {torch.cuda.get_device_name(device)} ({device})"
    worst = 0.0
    for tokens in TOKENS:
        ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:PICKED] for _ in range(tokens)]).int()
        weights = torch.rand((tokens, PICKED), generator=generator)
        inputs = torch.randn((tokens, HIDDEN), generator=generator)
        for dtype in (torch.float32, torch.bfloat16):
            x = inputs.to(dtype)
            try:
                workspace = poisoned(experts.layer, tokens, PICKED, device)
                y = compute(experts.layer, workspace, x, weights, ids)
                again = compute(experts.layer, workspace, x, weights, ids)
            except RuntimeError as problem:  # torch's, of a fault on the device
                raise CheckError(f"{name}, {tokens} tokens: {str(problem).splitlines()[0]}") from problem
            rms = relative_rms(y, moe_ref(x, weights, ids, experts.w13, experts.w2, SWIGLU))
            limit = max(RMS_MAX, torch.finfo(dtype).eps)  # bf16 may differ by one rounding of the last bit
            if not rms <= limit:
                raise CheckError(f"{name}, {tokens} tokens: off by relative RMS {rms:.2g}, limit {limit:.2g}")
            if not torch.equal(y, again):
                raise CheckError(f"{name}, {tokens} tokens: the same call gave another result")
            if dtype == torch.float32:
                worst = max(worst, rms)
    return worst
