"""The shared-memory pages: round trip, ownership, and what happens to those of dead processes."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tandem.stats import COUNTERS, Identity, RankStats, StatsPage, agreement, read_ranks


def identity(rank: int = 0, ranks: int = 1, config: str = "c", profile: str | None = None) -> Identity:
    return Identity(
        rank=rank,
        ranks=ranks,
        config_sha256=config,
        profile_sha256=profile,
        package_sha256="p",
        settings={"cpu_threads": 2},
        origins={"cpu_threads": "profile"},
        fp4_top=3,
        threads=2,
        kernel="scalar",
        cpus=[[0], [1]],
        shared_cores=False,
        pinning_errors=[],
    )


def mine() -> list[RankStats]:
    gc.collect()
    return [page for page in read_ranks(os.getpid()) if page.identity.package_sha256 == "p"]


def test_round_trip() -> None:
    page = StatsPage(identity(), [(0, 4), (7, 2)])
    page.add("steps", 2)
    page.add("expert_ns", 5_000_000_000)
    page.route(7, np.array([3, 9]))
    page.route(7, np.array([1, 0]))
    (read,) = mine()
    assert read.identity == identity()
    assert read.pid == os.getpid()
    assert read.counters == {**dict.fromkeys(COUNTERS, 0), "steps": 2, "expert_ns": 5_000_000_000}
    assert read.routing == {0: [0, 0, 0, 0], 7: [4, 9]}
    del page
    assert mine() == []


def test_unknown_counter_and_layer() -> None:
    page = StatsPage(identity(), [(0, 4)])
    with pytest.raises(KeyError, match="nothing"):
        page.add("nothing", 1)
    with pytest.raises(KeyError):
        page.route(1, np.zeros(4, dtype=np.int64))


def test_of_several_pages_of_a_process_the_newest_counts() -> None:
    pages = [StatsPage(identity(config=name), [(0, 1)]) for name in ("old", "new")]
    assert [page.identity.config_sha256 for page in mine()] == ["new"]
    del pages


CHILD = """
import os, signal, sys
sys.path.insert(0, os.getcwd())
from tests.engine.test_stats import identity
from tandem.stats import StatsPage
page = StatsPage(identity(rank=1, ranks=2), [(0, 1)])
if os.fork() == 0:
    sys.stdin.close()
    signal.pause()
print("ready", flush=True)
sys.stdin.readline()
os.killpg(0, signal.SIGKILL)
"""


def test_a_child_is_found_once_and_its_page_goes_with_it() -> None:
    """Killed, so that none of its code runs; and with a fork of its own, which shares the page."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        assert [page.pid for page in mine()] == [child.pid]
        assert len(read_ranks(child.pid)) == 1
        assert read_ranks(1 << 30) == []
        child.stdin.write("\n")
        child.stdin.flush()
        child.wait(timeout=30)
    assert mine() == []


def test_agreement() -> None:
    def rank(index: int, **changes: str) -> RankStats:
        return RankStats(100 + index, identity(index, 2)._replace(**changes), {}, {})  # type: ignore[arg-type]

    both = [rank(0), rank(1)]
    assert agreement(both, "c", None) == []
    assert agreement([], "c", None) == ["no rank has reported; the engine is still loading, or runs on another machine"]
    assert agreement([rank(0)], "c", None) == ["ranks [0] have reported, of 2"]
    assert agreement([rank(0), rank(1, config_sha256="x")], "c", None) == [
        "rank 1: config_sha256 x != c of the API server"
    ]
    assert agreement(both, "c", "q")[0] == "rank 0: profile_sha256 None != q of the API server"
    assert "package x differs" in agreement([rank(0), rank(1, package_sha256="x")], "c", None)[0]
