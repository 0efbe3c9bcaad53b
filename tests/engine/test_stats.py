"""The shared-memory pages: round trip, ownership, and what happens to those of dead processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tandem.stats import (
    COUNTERS,
    Identity,
    RankStats,
    StatsPage,
    agreement,
    read_page,
    read_ranks,
    remove_stale,
    start_time,
)


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
        cpus=[[0], [1]],
        shared_cores=False,
        pinning_errors=[],
    )


def test_round_trip(tmp_path: Path) -> None:
    page = StatsPage(identity(), [(0, 4), (7, 2)], tmp_path)
    page.add("steps", 2)
    page.add("expert_ns", 5_000_000_000)
    page.route(7, np.array([3, 9]))
    page.route(7, np.array([1, 0]))
    read = read_page(page.path)
    assert read is not None
    assert read.identity == identity()
    assert read.pid == os.getpid()
    assert read.counters == {**dict.fromkeys(COUNTERS, 0), "steps": 2, "expert_ns": 5_000_000_000}
    assert read.routing == {0: [0, 0, 0, 0], 7: [4, 9]}
    page.close()
    assert list(tmp_path.iterdir()) == []


def test_unknown_counter_and_layer(tmp_path: Path) -> None:
    page = StatsPage(identity(), [(0, 4)], tmp_path)
    with pytest.raises(KeyError, match="nothing"):
        page.add("nothing", 1)
    with pytest.raises(KeyError):
        page.route(1, np.zeros(4, dtype=np.int64))
    page.close()


def test_pages_of_one_process_do_not_collide_and_the_newest_counts(tmp_path: Path) -> None:
    first = StatsPage(identity(), [(0, 1)], tmp_path)
    second = StatsPage(identity(config="new"), [(0, 1)], tmp_path)
    os.utime(first.path, ns=(1, 1))
    assert first.path != second.path
    assert [page.identity.config_sha256 for page in read_ranks(os.getpid(), tmp_path)] == ["new"]
    first.close()
    second.close()


def test_a_page_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "page"
    path.write_bytes(bytes(4096))
    assert read_page(path) is None
    assert read_page(tmp_path / "none") is None


CHILD = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, os.getcwd())
from tests.engine.test_stats import identity
from tandem.stats import StatsPage
page = StatsPage(identity(rank=1, ranks=2), [(0, 1)], Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
if sys.argv[2] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_a_child_is_found_and_its_page_goes_with_it(tmp_path: Path, end: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path), end],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        assert [page.pid for page in read_ranks(os.getpid(), tmp_path)] == [child.pid]
        assert read_ranks(child.pid, tmp_path) != []
        assert read_ranks(1 << 30, tmp_path) == []
        assert remove_stale(tmp_path) == []
        child.stdin.write("\n")
        child.stdin.flush()
        child.wait(timeout=30)
    assert len(list(tmp_path.iterdir())) == (1 if end == "kill" else 0)
    assert read_ranks(os.getpid(), tmp_path) == []
    assert len(remove_stale(tmp_path)) == (1 if end == "kill" else 0)
    assert list(tmp_path.iterdir()) == []


def test_a_page_of_a_multiprocessing_child_goes_with_it(tmp_path: Path) -> None:
    """vLLM's workers are such children: they end without atexit."""
    import multiprocessing

    child = multiprocessing.get_context("spawn").Process(target=_write_and_end, args=(tmp_path,))
    child.start()
    child.join(timeout=60)
    assert child.exitcode == 0
    assert list(tmp_path.iterdir()) == []


def _write_and_end(directory: Path) -> None:
    page = StatsPage(identity(), [(0, 1)], directory)
    globals()["kept"] = page  # as the engine keeps it: until the process ends


def test_a_reused_pid_is_not_the_same_process(tmp_path: Path) -> None:
    pid = os.getpid()
    started = start_time(pid)
    assert started is not None
    (tmp_path / f"tandem-stats-{os.getuid()}-{pid}-{started + 1}-0").write_bytes(b"")
    assert read_ranks(pid, tmp_path) == []
    assert len(remove_stale(tmp_path)) == 1


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
