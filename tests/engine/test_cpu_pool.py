"""Where threads run, and that their errors arrive."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from tandem.config import TandemConfig
from tandem.cpu_pool import CpuPlan, CpuPool, compact, plan_cpus, remembered_affinity, spread
from tandem.topology import Cpu

# two NUMA nodes, two L3 groups each, two cores a group, two threads a core: siblings are i and i + 8
BOX = tuple(
    Cpu(id=core + 8 * smt, core=core, smt=smt, l3=core // 2 * 2, node=core // 4) for smt in (0, 1) for core in range(8)
)


def cpus_of(plan: CpuPlan) -> list[list[int]]:
    return [sorted(cpus) for cpus in plan.cpus]


def test_default_leaves_the_reserve_to_vllm() -> None:
    plan = plan_cpus(BOX, TandemConfig())
    assert len(plan.cpus) == 6
    assert cpus_of(plan)[0] == list(range(16))


def test_at_least_one_thread() -> None:
    assert len(plan_cpus(BOX[:1], TandemConfig(reserve_cores=4)).cpus) == 1


def test_compact_fills_one_cache_after_another_and_siblings_last() -> None:
    assert compact(BOX) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
    assert cpus_of(plan_cpus(BOX, TandemConfig(cpu_threads=3, pinning="compact"))) == [[0], [1], [2]]


def test_spread_goes_round_the_caches_and_siblings_last() -> None:
    assert spread(BOX)[:8] == [0, 2, 4, 6, 1, 3, 5, 7]
    assert cpus_of(plan_cpus(BOX, TandemConfig(cpu_threads=3, pinning="spread"))) == [[0], [2], [4]]


def test_smt_adds_siblings_after_all_cores() -> None:
    plan = plan_cpus(BOX, TandemConfig(cpu_threads=9, pinning="compact", smt=True))
    assert cpus_of(plan)[8] == [8]
    assert len(plan_cpus(BOX, TandemConfig(smt=True)).cpus) == 12


def test_more_threads_than_cpus_wrap_around() -> None:
    assert cpus_of(plan_cpus(BOX[:2], TandemConfig(cpu_threads=3, pinning="compact"))) == [[0], [1], [0]]


@pytest.mark.parametrize("pinning", ["none", "compact", "spread"])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_take_disjoint_whole_cores(pinning: str, ranks: int) -> None:
    used: list[set[int]] = []
    for rank in range(ranks):
        plan = plan_cpus(BOX, TandemConfig(pinning=pinning, smt=True), rank, ranks)
        assert not plan.shared
        used.append({cpu % 8 for cpus in plan.cpus for cpu in cpus})
    assert sum(len(cores) for cores in used) == len(set().union(*used))


def test_idle_threads_spin_only_on_cores_of_their_own() -> None:
    assert plan_cpus(BOX, TandemConfig()).own_cores
    assert not plan_cpus(BOX, TandemConfig(cpu_threads=7)).own_cores
    assert plan_cpus(BOX, TandemConfig(cpu_threads=7, reserve_cores=1)).own_cores
    assert not plan_cpus(BOX[:2], TandemConfig()).own_cores
    assert plan_cpus(BOX, TandemConfig(), 1, 2).own_cores


def test_more_ranks_than_cores_share_and_say_so() -> None:
    plans = [plan_cpus(BOX[:2], TandemConfig(), rank, 3) for rank in range(3)]
    assert all(plan.shared for plan in plans)


def test_jobs_run_on_their_cpus() -> None:
    allowed = sorted(remembered_affinity())
    wanted = [frozenset({allowed[0]}), frozenset({allowed[-1]})]
    pool = CpuPool(CpuPlan(tuple(wanted), False, False))
    seen: dict[int, set[int]] = {}

    def job(index: int) -> None:
        seen[index] = os.sched_getaffinity(0)

    pool.run([lambda: job(0), lambda: job(1)])
    pool.close()
    assert pool.pin_failures == ()
    assert seen == {0: set(wanted[0]), 1: set(wanted[1])}


def test_operators_inside_the_pool_use_one_thread_each_and_others_keep_theirs() -> None:
    before = torch.get_num_threads()
    pool = CpuPool(CpuPlan((remembered_affinity(),) * 2, False, False))
    seen: list[int] = []
    pool.run([lambda: seen.append(torch.get_num_threads())] * 2)
    pool.close()
    assert seen == [1, 1]
    assert torch.get_num_threads() == before


def test_a_failed_pin_is_reported() -> None:
    pool = CpuPool(CpuPlan((frozenset({100_000}), remembered_affinity()), False, False))
    assert len(pool.pin_failures) == 1
    assert "100000" in pool.pin_failures[0]
    done = []
    pool.run([lambda: done.append(1)])
    pool.close()
    assert done == [1]


def test_an_error_arrives_after_all_jobs_ended() -> None:
    pool = CpuPool(CpuPlan((remembered_affinity(),) * 2, False, False))
    ended = threading.Event()

    def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        pool.run([fail, ended.set])
    assert ended.is_set()
    pool.run([lambda: None])
    pool.close()


def test_threads_end_with_the_pool() -> None:
    others = set(threading.enumerate())  # an engine in this process has a pool of its own
    pool = CpuPool(CpuPlan((remembered_affinity(),) * 2, False, False))
    mine = set(threading.enumerate()) - others
    assert mine
    del pool
    for thread in mine:
        thread.join(timeout=10)
    assert not any(thread.is_alive() for thread in mine)
