"""vLLM's Marlin experts as a peer: stood in for here, found in the installed vLLM, and failing as a note."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.bench import gpu, peer_marlin
from tandem.bench.cpu import Geometry
from tandem.bench.peer_marlin import MarlinPeer
from tandem.codec.fp4 import Packed, unpack
from tandem.compat import MarlinFp4, marlin_fp4
from tandem.kernels.moe.ref import Swiglu, moe_ref

CPU = torch.device("cpu")
SMALL = Geometry(hidden=64, inner=32, picked=2)
LOAD = gpu.load_of(SMALL, "fp4", 1, "distinct", 1 << 14)


def stand_in(swap_nibbles: bool = False) -> MarlinFp4:
    def prepare(_layer: object, w13: torch.Tensor, w2: torch.Tensor, *scales: torch.Tensor) -> tuple[Any, ...]:
        return (w13 >> 4 | w13 << 4 if swap_nibbles else w13, w2, *scales)

    def moe(**call: Any) -> None:
        w13, w2 = unpack(Packed(call["w1"], call["w1_scale"])), unpack(Packed(call["w2"], call["w2_scale"]))
        ids, limit = call["topk_ids"], call["activation_config"].clamp_limit
        y = moe_ref(call["hidden_states"], call["topk_weights"], ids, w13, w2, Swiglu(limit))
        call["output"].copy_(y)

    return MarlinFp4(
        version="0.31.0",
        moe=moe,
        prepare=prepare,
        locks=lambda device: torch.zeros(1, device=device),
        moe_sum=lambda *_: None,
        silu="silu",
        activation_config=SimpleNamespace,
        quant_type_id=1,
    )


@pytest.fixture(autouse=True)
def no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    def replays(launch: Callable[[], None], calls: int, passes: int) -> list[float]:
        launch()
        return [float(calls)] * passes

    monkeypatch.setattr(peer_marlin, "graph_replays_us", replays)
    monkeypatch.setattr(peer_marlin, "EXPERTS_MAX", LOAD.experts)


def test_a_right_peer_has_times_and_says_how_right() -> None:
    peer = MarlinPeer(CPU, stand_in)
    assert peer.replays_us(SMALL, LOAD, 3) == [float(len(LOAD.calls))] * 3
    assert peer.note() == f"vLLM 0.31.0, {LOAD.experts} experts in its layer, relative RMS 0"


def test_a_wrong_peer_is_never_timed() -> None:
    answer = MarlinPeer(CPU, lambda: stand_in(swap_nibbles=True)).replays_us(SMALL, LOAD, 3)
    assert isinstance(answer, str)
    assert answer.startswith("CheckError: its result is off by relative RMS 1")


def missing() -> MarlinFp4:
    raise ImportError("libcudart.so.13: cannot open shared object file")


def test_a_peer_that_is_not_there_is_a_note() -> None:
    peer = MarlinPeer(CPU, missing)
    assert peer.replays_us(SMALL, LOAD, 3) == "ImportError: libcudart.so.13: cannot open shared object file"
    assert peer.note() == ""


def test_more_experts_than_its_layer_has_are_refused() -> None:
    load = LOAD._replace(experts=LOAD.experts + 1)
    answer = MarlinPeer(CPU, stand_in).replays_us(SMALL, load, 3)
    assert answer == f"UsageError: {load.experts} experts are asked for; its layer has {LOAD.experts}"


@pytest.mark.vllm
@pytest.mark.full
def test_the_installed_vllm_has_what_the_peer_calls(capsys: pytest.CaptureFixture[str]) -> None:
    """A build for CPUs has the functions and not the operators: a note, and nothing on stdout."""
    found = marlin_fp4()
    assert callable(found.moe) and found.quant_type_id != 0
    assert found.activation_config(clamp_limit=10.0).clamp_limit == 10.0
    answer = MarlinPeer(CPU).replays_us(SMALL, LOAD, 3)
    if not torch.cuda.is_available():
        assert isinstance(answer, str)
        assert "marlin" in answer
    assert capsys.readouterr().out == ""
