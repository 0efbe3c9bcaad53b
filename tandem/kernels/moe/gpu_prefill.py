"""Routed experts of many rows on a GPU: each picked expert is decoded once (`gpu/decode.cu`) and torch multiplies."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import torch

from tandem.codec.sac import taps
from tandem.codec.scales import levels
from tandem.codec.tiles import Kind
from tandem.kernels.moe.gpu import DTYPES, KINDS, SOURCE, GpuLayer
from tandem.kernels.nvrtc import Program, checked, load

THREADS = 256


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("tiles", ctypes.c_void_p),
        ("tile_stride", ctypes.c_int64),
        ("window_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("base", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("rows", "inputs", "windows", "pad")),
    )


class _Params(ctypes.Structure):
    _fields_ = (
        ("matrix", _Matrix * 3),
        ("levels", ctypes.c_void_p),
        ("kind", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("taps", ctypes.c_float * 96),
    )


@lru_cache(maxsize=1)
def program() -> Program:
    return Program("decode", (SOURCE / "decode.cu").read_text(encoding="utf-8"))


class Prefill:
    """Scratch for one decoded expert, and the calls that use it. One for all layers of a size."""

    def __init__(self, hidden: int, inner: int, dtype: torch.dtype, device: torch.device) -> None:
        self.w13 = torch.empty(2 * inner, hidden, dtype=dtype, device=device)
        self.w2 = torch.empty(hidden, inner, dtype=dtype, device=device)
        self._levels = levels().to(device)
        self._params = _Params(levels=self._levels.data_ptr(), dtype=DTYPES[dtype])
        self._params.taps[:] = [float(value) for value in taps().transpose(1, 2).flatten()]

    def decode(self, layer: GpuLayer, address: int, kind: Kind) -> None:
        """The record at a device address -> w13 and w2, rounded from f32."""
        from cuda.bindings import driver

        code, inner, params = layer.codes[kind], layer.inner, self._params
        outs = (self.w13[:inner], self.w13[inner:], self.w2)
        parts = (code.w1, code.w3, code.w2)
        for index, (part, out) in enumerate(zip(parts, outs, strict=True)):
            base = None if code.bases_offset is None else address + code.bases_offset + 4 * index
            params.matrix[index] = _Matrix(
                address + part.offset, part.tile_stride, part.window_stride, out.data_ptr(), base,
                out.shape[0], out.shape[1], part.windows, 0,
            )  # fmt: skip
        params.kind = KINDS[kind]
        argument = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        function = load(program(), ("tandem_decode",), self.w2.device.index)["tandem_decode"]
        windows, tiles = max(part.windows for part in parts), max(part.tiles for part in parts)
        stream = torch.cuda.current_stream(self.w2.device).cuda_stream
        checked(
            driver.cuLaunchKernel(function, windows, tiles, 3, THREADS, 1, 1, 0, stream, ctypes.addressof(argument), 0)
        )

    def moe(self, layer: GpuLayer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """x: [T, H], weights: [T, K] f32, ids: [T, K] int on the device -> [T, H] as x.

        Experts that are not on the device or whose id is below 0 add nothing. Reads the routing back, so no graph can
        hold it. Products and their sum stay f32; the activation is rounded to x's dtype once.
        """
        picked = ids.shape[1]
        flat = ids.flatten().long()
        order = flat.argsort(stable=True)
        experts = len(layer.records)
        counted = torch.bincount(flat.clamp(min=-1) + 1, minlength=experts + 1)
        host = torch.cat([counted, layer.records, layer.kinds.long()]).tolist()
        counts, addresses, kinds = host[: experts + 1], host[experts + 1 : -experts], host[-experts:]
        names: Sequence[Kind] = tuple(KINDS)
        results = torch.zeros(flat.shape[0], layer.hidden, dtype=torch.float32, device=x.device)
        start = counts[0]  # pairs without an expert come first
        for expert, count in enumerate(counts[1:]):
            if count == 0:
                continue
            pairs = order[start : start + count]
            start += count
            if addresses[expert] == 0:
                continue
            self.decode(layer, addresses[expert], names[kinds[expert]])
            rows = x[pairs // picked]
            if layer.weight_on_input:
                rows = rows * weights.flatten()[pairs].to(x.dtype)[:, None]
            both = _multiply(rows, self.w13)
            activated = layer.swiglu(both[:, : layer.inner], both[:, layer.inner :])
            results[pairs] = _multiply(activated.to(x.dtype), self.w2)
        factors = torch.ones_like(weights) if layer.weight_on_input else weights
        return (results.view(*ids.shape, -1) * factors[..., None]).sum(1).to(x.dtype)


def _multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x: [N, I], weight: [O, I] of one dtype -> [N, O] f32, not rounded in between."""
    if x.dtype == torch.float32:
        return x @ weight.T
    return torch.mm(x, weight.T, out_dtype=torch.float32)
