"""The kernels' threads: where they run, that they come and go, and that a dead one is never waited for."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from tandem.errors import CheckError
from tandem.kernels.moe import native
from tandem.kernels.moe.ref import Swiglu
from tests.kernels.records import Experts, random_experts


@pytest.fixture(scope="module")
def case() -> Experts:
    return random_experts(["sac"] * 2, 64, 64, Swiglu(), seed=1)


X, WEIGHTS, IDS = torch.ones((1, 64)), torch.ones((1, 2)), torch.tensor([[0, 1]])


def thread_count() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_created_and_destroyed_200_times(case: Experts) -> None:
    before = thread_count()
    expected = None
    for turn in range(200):
        engine = native.Engine([()] * (1 + turn % 5), spin_ms=turn % 2)
        if turn % 3:
            y = engine.moe(case.layer, X, WEIGHTS, IDS)
            expected = y if expected is None else expected
            assert torch.equal(y, expected)
        engine.close()
    assert thread_count() <= before


def test_collected_engines_end_their_threads() -> None:
    before = thread_count()
    for _ in range(3):
        native.Engine([()] * 4)
    assert thread_count() <= before + 4  # the last may still be referenced


def test_threads_run_where_they_are_told(case: Experts) -> None:
    cpu = min(os.sched_getaffinity(0))
    before = {task.name for task in Path("/proc/self/task").iterdir()}
    engine = native.Engine([[cpu]] * 3, spin_ms=1)
    assert engine.pin_failures == ()
    new = [task for task in Path("/proc/self/task").iterdir() if task.name not in before]
    assert len(new) == 3
    for task in new:
        assert f"Cpus_allowed_list:\t{cpu}\n" in (task / "status").read_text()
    engine.moe(case.layer, X, WEIGHTS, IDS)
    engine.close()


def test_a_cpu_that_is_not_there_is_counted_and_the_thread_still_works(case: Experts) -> None:
    missing = 4000
    engine = native.Engine([[missing], ()], spin_ms=1)
    assert len(engine.pin_failures) == 1
    assert str(missing) in engine.pin_failures[0]
    assert torch.isfinite(engine.moe(case.layer, X, WEIGHTS, IDS)).all()
    engine.close()


@pytest.mark.parametrize("dead", [0, 2])
def test_a_dead_thread_raises_and_the_engine_stays_refused(case: Experts, dead: int) -> None:
    engine = native.Engine([()] * 3, spin_ms=1)
    engine.moe(case.layer, X, WEIGHTS, IDS)
    engine.kill_thread(dead)
    for _ in range(2):
        with pytest.raises(CheckError, match=f"thread {dead} of the pool is dead"):
            engine.moe(case.layer, X, WEIGHTS, IDS)
    engine.close()


def test_a_closed_engine_is_refused(case: Experts) -> None:
    engine = native.Engine([()])
    engine.close()
    engine.close()
    with pytest.raises(CheckError, match="closed"):
        engine.moe(case.layer, X, WEIGHTS, IDS)


def test_callers_take_turns(case: Experts) -> None:
    engine = native.Engine([()] * 2, spin_ms=1)
    expected = engine.moe(case.layer, X, WEIGHTS, IDS)
    wrong: list[int] = []

    def call() -> None:
        for turn in range(50):
            if not torch.equal(engine.moe(case.layer, X, WEIGHTS, IDS), expected):
                wrong.append(turn)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong
    engine.close()


def test_a_forked_child_is_told_and_can_leave(case: Experts) -> None:
    engine = native.Engine([()] * 2, spin_ms=1)
    engine.moe(case.layer, X, WEIGHTS, IDS)
    child = os.fork()
    if child == 0:
        try:
            engine.moe(case.layer, X, WEIGHTS, IDS)
            os._exit(1)
        except CheckError as problem:
            engine.close()
            os._exit(0 if "another process" in str(problem) else 2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    engine.close()
