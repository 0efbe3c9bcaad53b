"""Routed experts of many rows on a GPU: each picked expert is decoded once (`gpu/decode.cu`) and torch multiplies."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import torch

from tandem.codec.sac import taps
from tandem.codec.scales import levels
from tandem.codec.tiles import TILE_ROWS, Kind, TileMatrix
from tandem.kernels.moe.gpu import DTYPES, KINDS, SOURCE, GpuLayer
from tandem.kernels.nvrtc import Program, checked, load

THREADS = 256


class _Params(ctypes.Structure):
    _fields_ = (
        ("tiles", ctypes.c_void_p),
        ("tile_stride", ctypes.c_int64),
        ("window_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("levels", ctypes.c_void_p),
        ("base", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("kind", "rows", "inputs", "dtype")),
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

    def decode(self, layer: GpuLayer, address: int, kind: Kind) -> None:
        """The record at a device address -> w13 and w2, rounded from f32."""
        code = layer.codes[kind]
        inner = layer.inner
        for index, (part, out) in enumerate(
            ((code.w1, self.w13[:inner]), (code.w3, self.w13[inner:]), (code.w2, self.w2))
        ):
            base = None if code.bases_offset is None else address + code.bases_offset + 4 * index
            self._launch(address + part.offset, part, kind, base, out)

    def _launch(self, tiles: int, part: TileMatrix, kind: Kind, base: int | None, out: torch.Tensor) -> None:
        from cuda.bindings import driver

        params = _Params(
            tiles=tiles, tile_stride=part.tile_stride, window_stride=part.window_stride, out=out.data_ptr(),
            levels=self._levels.data_ptr(), base=base, kind=KINDS[kind], rows=out.shape[0], inputs=out.shape[1],
            dtype=DTYPES[out.dtype],
        )  # fmt: skip
        params.taps[:] = _taps()
        argument = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        function = load(program(), ("tandem_decode",), out.device.index)["tandem_decode"]
        blocks = -(-out.shape[0] // TILE_ROWS)
        stream = torch.cuda.current_stream(out.device).cuda_stream
        checked(
            driver.cuLaunchKernel(
                function, part.windows, blocks, 1, THREADS, 1, 1, 0, stream, ctypes.addressof(argument), 0
            )
        )

    def moe(self, layer: GpuLayer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """x: [T, H], weights: [T, K] f32, ids: [T, K] int on the device -> [T, H] as x.

        Experts that are not on the device or whose id is below 0 add nothing. Reads the routing back, so no graph can
        hold it. Results of pairs are rounded to x's dtype before they are added.
        """
        picked = ids.shape[1]
        flat = ids.flatten().long()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat.clamp(min=-1) + 1, minlength=len(layer.records) + 1).tolist()
        addresses, kinds = layer.records.tolist(), layer.kinds.tolist()
        names: Sequence[Kind] = tuple(KINDS)
        results = x.new_zeros(flat.shape[0], layer.hidden)
        start = counts[0]  # pairs without an expert come first
        for expert, count in enumerate(counts[1:]):
            pairs = order[start : start + count]
            start += count
            if count == 0 or addresses[expert] == 0:
                continue
            self.decode(layer, addresses[expert], names[kinds[expert]])
            rows = x[pairs // picked]
            if layer.weight_on_input:
                rows = rows * weights.flatten()[pairs].to(x.dtype)[:, None]
            both = (rows @ self.w13.T).float()
            activated = layer.swiglu(both[:, : layer.inner].contiguous(), both[:, layer.inner :].contiguous())
            results[pairs] = activated.to(x.dtype) @ self.w2.T
        factors = torch.ones_like(weights) if layer.weight_on_input else weights
        return (results.view(*ids.shape, -1).float() * factors[..., None]).sum(1).to(x.dtype)


@lru_cache(maxsize=1)
def _taps() -> list[float]:
    """[3][16][2] as one list."""
    return [float(value) for value in taps().transpose(1, 2).flatten()]
