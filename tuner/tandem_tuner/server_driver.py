"""The real box: `vllm serve` with the Tandem plugin, one boot at a time, as `tandem serve` would start it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import httpx

from tandem import launch, refuse
from tandem.capabilities import capabilities
from tandem.errors import ServerError
from tandem.machine import Machine
from tandem.package.manifest import Manifest
from tandem.profile import Profile, new_profile
from tandem.server_process import ServerProcess, free_port
from tandem.versions import TANDEM
from tandem_evals.client import Ask, new_http, server_info, stream_chat
from tandem_evals.records import RecordWriter
from tandem_evals.task import Item, Task
from tandem_tuner.driver import Failure
from tandem_tuner.interrupts import Interrupts
from tandem_tuner.records import Outcome, Sample, Settings

PORT_TRIES = 3  # another process may take a free port before the server does
TELL_EVERY_S = 15.0
SEED = 0
OFFLINE = {"HF_HUB_OFFLINE": "1"}  # the package is on disk


@dataclass(frozen=True, slots=True)
class Target:
    """What is served, and on what."""

    package: Path
    manifest: Manifest
    config: dict[str, Any]  # config.json
    machine: Machine
    vllm: refuse.Vllm

    def profile(self, settings: Settings, study: str, **more: Any) -> Profile:
        """A profile of these settings for this box and package."""
        return new_profile(
            machine=self.machine,
            package_sha256=self.manifest.sha256,
            knobs=settings.model_dump(),
            study=study,
            tandem=TANDEM,
            vllm=self.vllm.version,
            **more,
        )

    def plan(self, profile: Path, port: int) -> launch.ServePlan:
        return launch.plan_server(
            package=self.package,
            served_name=self.manifest.source.name,
            config=self.config,
            profile=profile,
            host=None,
            port=port,
            flags=(),
            platform=self.vllm.platform,
            capabilities=capabilities(),
            cpus=[cpu.id for cpu in self.machine.usable],
            cores=self.machine.usable_cores,
            executable=launch.vllm_executable(),
            plugins=launch.general_plugins(),
            environment=os.environ,
        )


class ServerDriver:
    """Boots `target` with settings in the study's one profile path; each boot's log and records in a folder."""

    def __init__(
        self,
        target: Target,
        task: Task,
        *,
        study: str,
        profile_path: Path,
        boot_directory: Callable[[int], Path],
        interrupts: Interrupts,
        say: Callable[[str], None],
    ) -> None:
        self.target = target
        self.task = task
        self.study = study
        self.profile_path = profile_path
        self.boot_directory = boot_directory
        self.interrupts = interrupts
        self.say = say
        self._process: ServerProcess | None = None

    def now_s(self) -> float:
        return time.monotonic()

    def utc(self) -> str:
        return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")

    def boot(self, number: int, settings: Settings, timeout_s: float) -> RunningServer | Failure:
        profile = self.target.profile(settings, self.study)
        profile.write(self.profile_path)
        for _ in range(PORT_TRIES):
            booted = self._boot_once(number, profile, timeout_s)
            if not isinstance(booted, Failure) or booted.outcome is not Outcome.PORT_IN_USE:
                break
        return booted

    def close(self) -> None:
        """Take down what still runs."""
        if self._process is not None:
            with self.interrupts.shield():
                self._process.stop()
                self._process = None

    def _boot_once(self, number: int, profile: Profile, timeout_s: float) -> RunningServer | Failure:
        port = free_port()
        plan = self.target.plan(self.profile_path, port)
        folder = self.boot_directory(number)
        process = self._process = ServerProcess(
            plan.argv,
            log=folder / "server.log",
            purpose=f"boot {number} of study {self.study}",
            port=port,
            env={**os.environ, **plan.env, **OFFLINE},
        )
        ready = False
        try:
            process.start()
            result = process.wait_ready(timeout_s, on_wait=_Waiting(self.say))
            ready = result.outcome.value == Outcome.OK.value
        finally:
            if not ready:
                self.close()
        if not ready:
            return Failure(Outcome(result.outcome.value), f"{result.reason} (log: {result.log})")
        return RunningServer(self, process, profile.sha256, folder, number)


class RunningServer:
    """A ready server."""

    def __init__(
        self, driver: ServerDriver, process: ServerProcess, written_sha256: str, folder: Path, number: int
    ) -> None:
        self._driver = driver
        self._process = process
        self._sha256 = written_sha256
        self._number = number
        self._asked = 0
        self._writer = RecordWriter(folder / "requests.jsonl")
        self._http = new_http()
        self._model = driver.target.manifest.source.name

    @property
    def written_sha256(self) -> str:
        return self._sha256

    def echoed_sha256(self) -> str | Failure:
        try:
            info = server_info(self._process.url, self._http)
        except (ServerError, httpx.HTTPError) as problem:
            return self._failure(Failure(Outcome.REQUEST_FAILED, f"/tandem/profile: {problem}"))
        if info.profile is None:
            return Failure(Outcome.WRONG_PROFILE, "no /tandem/profile: the server runs without the Tandem plugin")
        self._model = info.model
        return info.profile_sha256 or "none"

    def ask(self, item: Item, *, warmup: bool, timeout_s: float) -> Sample | Failure:
        task = self._driver.task
        began = time.monotonic()
        record = stream_chat(
            self._process.url,
            self._model,
            task.prompt(item),
            max_tokens=task.max_tokens,
            seed=SEED,
            timeout_s=timeout_s,
            ask=Ask(self._asked, item.id, 0, self._number, "warmup" if warmup else "measured"),
            http=self._http,
        )
        record = task.judge(record, item)
        self._asked += 1
        self._writer.append(record)
        if record.outcome != "error":
            return Sample.of(record)
        hung = time.monotonic() - began >= timeout_s
        kind = Outcome.HUNG if hung else Outcome.REQUEST_FAILED
        return self._failure(Failure(kind, f"{item.id}: {record.error}"))

    def stop(self) -> None:
        self._http.close()
        self._writer.close()
        self._driver.close()

    def _failure(self, failure: Failure) -> Failure:
        """The server's own end, when it has ended, explains a failed request better than the request does."""
        ended = self._process.failure()
        return failure if ended is None else Failure(Outcome(ended.outcome.value), f"{ended.reason} (log: {ended.log})")


class _Waiting:
    """A progress line now and then while a server boots."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.next_s = TELL_EVERY_S

    def __call__(self, waited_s: float) -> None:
        if waited_s >= self.next_s:
            self.say(f"  booting, {waited_s:.0f} s")
            self.next_s = waited_s + TELL_EVERY_S
