"""What every driver has to do: one suite for the simulated box and for the real driver on a stub server."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tandem import launch, refuse
from tandem.machine import probe_machine
from tandem.package.manifest import read_manifest
from tandem.profile import load_profile
from tandem.target import read_config
from tandem_evals.tasks import gsm8k
from tandem_tuner.driver import Driver, Failure
from tandem_tuner.interrupts import Interrupts
from tandem_tuner.records import Outcome, Sample, Settings
from tandem_tuner.server_driver import ServerDriver, Target
from tests.tuner.fake import FakeDriver, Script
from tests.tuner.stub_package import write_gsm8k, write_package

GOOD = Settings(cpu_threads=1, pinning="none", fp4_top=2)
BAD = Settings(cpu_threads=2, pinning="none", fp4_top=2)


class Bench(NamedTuple):
    """A driver, how to make BAD settings fail, and the processes that are left."""

    driver: Driver
    fail_with: dict[Outcome, str]
    script: Path | None
    records: Path | None

    def scripted(self, outcome: Outcome) -> None:
        if isinstance(self.driver, FakeDriver):
            self.driver.script = Script(outcomes={"cpu_threads=2": outcome})
        else:
            assert self.script is not None
            self.script.write_text(json.dumps({"cpu_threads=2": self.fail_with[outcome]}))

    def nothing_left(self) -> bool:
        if isinstance(self.driver, FakeDriver):
            return not self.driver.alive
        return self.records is not None and not list(self.records.glob("*.json"))


@pytest.fixture(params=["fake", "stub"])
def bench(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    if request.param == "fake":
        yield Bench(FakeDriver(), {}, None, None)
        return
    script = tmp_path / "script.json"
    script.write_text("{}")
    monkeypatch.setenv("TANDEM_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("TANDEM_STUB", str(script))
    stub = Path(__file__).with_name("stub_server.py")
    monkeypatch.setattr(launch, "vllm_executable", lambda: (sys.executable, str(stub)))
    package = write_package(tmp_path / "package")
    target = Target(
        package, read_manifest(package), read_config(package), probe_machine(), refuse.Vllm("0.31.0", "cpu")
    )
    driver = ServerDriver(
        target,
        gsm8k.gsm8k(gsm8k.read_file(write_gsm8k(tmp_path / "gsm8k.jsonl")), max_tokens=16),
        study="test",
        profile_path=tmp_path / "profile.json",
        boot_directory=lambda number: tmp_path / f"boot-{number}",
        interrupts=Interrupts(),
        say=lambda _: None,
    )
    faults = {
        Outcome.OOM_HOST: "oom", Outcome.SELFCHECK_FAILED: "selfcheck", Outcome.BOOT_TIMEOUT: "never_ready",
        Outcome.HUNG: "hang", Outcome.REQUEST_FAILED: "error", Outcome.WRONG_PROFILE: "wrong_profile",
    }  # fmt: skip
    yield Bench(driver, faults, script, tmp_path / "state" / "run" / "servers")
    driver.close()


ITEM = gsm8k.Item("q", "What is 3 + 4?", "#### 7")


def test_a_good_server_answers_and_is_gone_after_stop(bench: Bench) -> None:
    before = bench.driver.now_s()
    server = bench.driver.boot(0, GOOD, timeout_s=60.0)
    assert not isinstance(server, Failure)
    assert bench.driver.now_s() > before
    assert server.echoed_sha256() == server.written_sha256
    first, second = server.ask(ITEM, warmup=True, timeout_s=20.0), server.ask(ITEM, warmup=False, timeout_s=20.0)
    assert isinstance(first, Sample) and isinstance(second, Sample)
    assert (first.phase, second.phase) == ("warmup", "measured")
    assert second.item == "q" and second.completion_tokens >= 2 and second.decode_ns > 0 and second.rate_tok_s
    server.stop()
    server.stop()
    assert bench.nothing_left()


@pytest.mark.parametrize("outcome", [Outcome.OOM_HOST, Outcome.SELFCHECK_FAILED, Outcome.BOOT_TIMEOUT])
def test_a_boot_that_fails_is_a_value_and_leaves_nothing(bench: Bench, outcome: Outcome) -> None:
    bench.scripted(outcome)
    result = bench.driver.boot(0, BAD, timeout_s=2.0 if outcome is Outcome.BOOT_TIMEOUT else 60.0)
    assert isinstance(result, Failure) and result.outcome is outcome and result.detail
    assert bench.nothing_left()


@pytest.mark.parametrize("outcome", [Outcome.HUNG, Outcome.REQUEST_FAILED])
def test_a_question_that_fails_is_a_value(bench: Bench, outcome: Outcome) -> None:
    bench.scripted(outcome)
    server = bench.driver.boot(0, BAD, timeout_s=60.0)
    assert not isinstance(server, Failure)
    answers = [server.ask(ITEM, warmup=False, timeout_s=0.5) for _ in range(4)]
    assert isinstance(answers[-1], Failure) and answers[-1].outcome is outcome
    server.stop()
    assert bench.nothing_left()


def test_other_settings_than_written_are_seen(bench: Bench) -> None:
    bench.scripted(Outcome.WRONG_PROFILE)
    server = bench.driver.boot(0, BAD, timeout_s=60.0)
    assert not isinstance(server, Failure)
    assert server.echoed_sha256() != server.written_sha256
    server.stop()


@pytest.mark.parametrize("bench", ["stub"], indirect=True)
def test_the_profile_path_holds_the_settings_of_the_boot(bench: Bench) -> None:
    assert isinstance(bench.driver, ServerDriver)
    server = bench.driver.boot(0, GOOD, timeout_s=60.0)
    assert not isinstance(server, Failure)
    profile = load_profile(bench.driver.profile_path)
    assert profile.knobs == GOOD.model_dump() and profile.sha256 == server.written_sha256
    server.stop()


def test_a_signal_waits_for_the_end_of_a_shield() -> None:
    interrupts, done = Interrupts(), []
    with pytest.raises(KeyboardInterrupt), interrupts.installed(), interrupts.shield():
        signal.raise_signal(signal.SIGINT)
        done.append("written")
    assert done == ["written"] and interrupts.pressed


def test_only_the_first_signal_counts() -> None:
    interrupts = Interrupts()
    with interrupts.installed():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        with interrupts.shield():
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
