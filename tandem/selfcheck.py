"""The boot's self-check: what will compute the experts is compared with `ref.py`, in under two seconds for any model.

A wrong kernel must never serve: a failure raises CheckError, which stops the boot, and starts with `selfcheck_failed`.
Three looks: each C++ kernel that the boot uses, on random codes (once a boot); each layer as it will serve, on the
package's own codes, with an input that is zero outside one window, so that the reference decodes a sliver of an expert
only; layers in torch, whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import torch

from tandem.backend import NativeBackend
from tandem.codec.tiles import TILE_ROWS, WINDOW_INPUTS, Kind
from tandem.errors import CheckError
from tandem.kernels.moe import gpu_check
from tandem.kernels.moe.check import RMS_MAX, bases_of, check_engine, decode_part
from tandem.kernels.moe.ref import moe_ref, relative_rms
from tandem.moe import Engine, MoeRuntime
from tandem.package.manifest import SectionName

ROWS = 3  # odd, and more than one: the last row is skipped (id -1)
FIX = "this build computes wrong results on this machine; do not serve with it, and report the line"


def check_layer(runtime: MoeRuntime, dtype: torch.dtype) -> None:
    """One expert of each section in use, by the call that serves; before the first layer, the kernels. CheckError."""
    native = isinstance(runtime.engine.backend, NativeBackend)
    with _plain_defaults():
        check_kernels(runtime.engine)
        for section in runtime.experts.placement.used:
            members = runtime.members[section]
            expert = int(members[runtime.index % len(members)])
            weights = _sliver(runtime, section, expert) if native else _whole(runtime, section, expert)
            for name, value in weights._asdict().items():
                if isinstance(value, torch.Tensor) and not bool(torch.isfinite(value).all()):
                    raise _failed(runtime, section, f"{name} of expert {expert} is not finite; run `tandem verify`")
            _compare(runtime, section, expert, weights, dtype)


def check_kernels(engine: Engine) -> None:
    """Every code of the package by the kernel that will read it, on random records; once. Raises CheckError."""
    if engine.kernels_checked or not isinstance(engine.backend, NativeBackend):
        return
    for spec in engine.manifest.codecs.values():
        try:
            check_engine(engine.backend.engine, cast(Kind, spec.name))
        except CheckError as problem:
            raise CheckError(f"selfcheck_failed: {problem}; {FIX}") from None
    engine.kernels_checked = True


def check_gpu(device: torch.device, kinds: Sequence[Kind] = ("sac", "fp4")) -> None:
    """The GPU kernels on random records of each kind and of all kinds in one layer. Raises CheckError."""
    with _plain_defaults():
        for some in dict.fromkeys((*((kind,) for kind in kinds), tuple(kinds))):
            try:
                gpu_check.check_kernels(device, some)
            except CheckError as problem:
                raise CheckError(f"selfcheck_failed: {problem}; {FIX}") from None


class _Weights(NamedTuple):
    """The part of an expert that a check looks at: inputs `inputs` to outputs `outputs` of the hidden size."""

    inputs: slice
    outputs: slice
    w13: torch.Tensor  # [2 * inner, inputs] f32, of this rank
    w2: torch.Tensor  # [outputs, inner]


def _sliver(runtime: MoeRuntime, section: SectionName, expert: int) -> _Weights:
    """One window of w1 and w3, and one tile of rows of w2, decoded from the unsliced record for this rank's rows."""
    store = runtime.experts
    layout, record = store.tiles[section], store.record(expert)
    kind, hidden, inner = layout.kind, store.entry.hidden, store.inner
    generator = torch.Generator(device="cpu").manual_seed(runtime.index)
    window = int(torch.randint(layout.w1.windows, (1,), generator=generator))
    tile = int(torch.randint(layout.w2.tiles, (1,), generator=generator))
    wide = WINDOW_INPUTS[kind]
    inputs = slice(window * wide, min((window + 1) * wide, hidden))
    outputs = slice(tile * TILE_ROWS, min((tile + 1) * TILE_ROWS, hidden))
    first = store.tp_rank * inner
    tiles = slice(first // TILE_ROWS, -(-(first + inner) // TILE_ROWS))
    windows = slice(first // wide, -(-(first + inner) // wide))
    bases = bases_of(record, layout)
    gate, up = (
        decode_part(record, kind, part, base, tiles, slice(window, window + 1))[:inner, : inputs.stop - inputs.start]
        for part, base in ((layout.w1, bases[0]), (layout.w3, bases[1]))
    )
    down = decode_part(record, kind, layout.w2, bases[2], slice(tile, tile + 1), windows)
    return _Weights(inputs, outputs, torch.cat([gate, up]), down[: outputs.stop - outputs.start, :inner])


def _whole(runtime: MoeRuntime, section: SectionName, expert: int) -> _Weights:
    """All of the expert, decoded whole and then cut to this rank's rows."""
    store = runtime.experts
    weights = store.decode_whole(section, expert)
    gate, up = weights.w13[0].chunk(2)
    mine = slice(store.tp_rank * store.inner, (store.tp_rank + 1) * store.inner)
    every = slice(0, store.entry.hidden)
    return _Weights(every, every, torch.cat([gate[mine], up[mine]]), weights.w2[0][:, mine])


def _compare(runtime: MoeRuntime, section: SectionName, expert: int, part: _Weights, dtype: torch.dtype) -> None:
    """The layer's output over NaN-poisoned buffers, for an input that is zero outside `part.inputs`, against ref.py."""
    generator = torch.Generator(device="cpu").manual_seed(runtime.index)
    hidden = runtime.experts.entry.hidden
    some = torch.randn((ROWS, part.inputs.stop - part.inputs.start), generator=generator).to(dtype)
    weights = torch.rand((ROWS, 1), generator=generator) + 0.1
    ids = torch.full((ROWS, 1), expert, dtype=torch.int32)
    ids[-1] = -1
    x = torch.zeros((ROWS, hidden), dtype=dtype)
    x[:, part.inputs] = some
    y = runtime.compute(x, weights, ids, poison=True)
    # the reference has one hidden size: zeros fill up the smaller of the two parts
    width = max(some.shape[1], part.w2.shape[0])
    pad = torch.nn.functional.pad
    expected = moe_ref(
        pad(some, (0, width - some.shape[1])),
        weights,
        ids.clamp(max=0),
        pad(part.w13, (0, width - some.shape[1]))[None],
        pad(part.w2, (0, 0, 0, width - part.w2.shape[0]))[None],
        runtime.swiglu,
        weight_on_input=runtime.weight_on_input,
    )[:, : part.w2.shape[0]]
    rms = relative_rms(y[:, part.outputs], expected)
    limit = max(RMS_MAX, torch.finfo(dtype).eps)  # half-precision outputs may differ by one rounding of the last bit
    if not rms <= limit:
        raise _failed(
            runtime, section, f"output of expert {expert} is off by relative RMS {rms:.2g}, limit {limit:.2g}"
        )
    if bool(y[-1].any()):
        raise _failed(runtime, section, "a row without experts gave a result")


@contextlib.contextmanager
def _plain_defaults() -> Iterator[None]:
    """vLLM's loader makes the model's dtype and device the defaults of torch. One thread: the operators are small."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float32)
    torch._C.set_num_threads(1)  # vLLM's CPU worker replaces torch.set_num_threads by a no-op
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch._C.set_num_threads(threads)
        torch.set_default_dtype(dtype)


def _failed(runtime: MoeRuntime, section: SectionName, what: str) -> CheckError:
    codec = runtime.experts.codec_name(section)
    return CheckError(
        f"selfcheck_failed: layer {runtime.index}, section {section} ({codec}), CPU kernel "
        f"{runtime.engine.backend.kernel}: {what}; {FIX}"
    )
