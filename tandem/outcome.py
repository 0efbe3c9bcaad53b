"""How the boot or the run of a server ended: one enumeration for the server, the tuner and the records. Pure."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Outcome(str, Enum):
    """A typed end. Only `ok` has a speed; no other one is ever scored as 0 tok/s."""

    OK = "ok"
    INFEASIBLE_PLAN = "infeasible_plan"  # the server said itself that its bytes do not fit
    OOM_HOST = "oom_host"
    OOM_GPU = "oom_gpu"
    BOOT_TIMEOUT = "boot_timeout"
    SELFCHECK_FAILED = "selfcheck_failed"  # a kernel of this box disagrees with its reference
    CRASHED = "crashed"
    PORT_IN_USE = "port_in_use"
    INTERRUPTED = "interrupted"  # a person or the system asked it to stop


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known about a server that is not, or no longer, ready."""

    returncode: int | None  # of its first process; negative: killed by that signal; None: it still runs
    log: str  # the end of its output
    group_oom_kills: int | None = None  # processes of this control group that the kernel killed since the start
    system_oom_kills: int | None = None  # the same for the whole machine; None: the kernel does not say
    timed_out: bool = False


class Verdict(NamedTuple):
    """An outcome and the one line that explains it."""

    outcome: Outcome
    reason: str


class LogRule(NamedTuple):
    """A line that decides an outcome, and who prints it."""

    pattern: re.Pattern[str]
    outcome: Outcome
    source: str


def _rule(pattern: str, outcome: Outcome, source: str) -> LogRule:
    return LogRule(re.compile(pattern), outcome, source)


SELFCHECK = re.compile(r"selfcheck_failed:")

# In order: the first rule with a match wins. A GPU's allocator also says "out of memory", so it stands before the
# host's; vLLM's own plan errors stand before both, because they say by how much.
LOG_RULES = (
    _rule(r"selfcheck_failed:", Outcome.SELFCHECK_FAILED, "tandem.selfcheck"),
    _rule(r"\bPlanError: ", Outcome.INFEASIBLE_PLAN, "tandem.errors"),
    _rule(r"No available memory for the cache blocks", Outcome.INFEASIBLE_PLAN, "vLLM v1/core/kv_cache_utils.py"),
    _rule(r"larger than the available KV cache memory", Outcome.INFEASIBLE_PLAN, "vLLM v1/core/kv_cache_utils.py"),
    _rule(r"is less than desired [CG]PU memory utilization", Outcome.INFEASIBLE_PLAN, "vLLM v1/worker/utils.py"),
    _rule(r"is less than requested memory for kv", Outcome.INFEASIBLE_PLAN, "vLLM v1/worker/cpu_worker.py"),
    _rule(r"torch\.(cuda\.)?OutOfMemoryError", Outcome.OOM_GPU, "torch c10/cuda/CUDACachingAllocator.cpp"),
    _rule(r"CUDA out of memory", Outcome.OOM_GPU, "torch c10/cuda/CUDACachingAllocator.cpp"),
    _rule(r"CUDA(_ERROR_OUT_OF_MEMORY| error: out of memory)", Outcome.OOM_GPU, "CUDA driver and runtime"),
    _rule(r"DefaultCPUAllocator: (can't allocate|not enough) memory", Outcome.OOM_HOST, "torch c10/core/alignment"),
    _rule(r"(?m)^(\(.*?\) )?.{0,80}\bMemoryError\b", Outcome.OOM_HOST, "Python"),
    _rule(r"std::bad_alloc", Outcome.OOM_HOST, "C++ runtime"),
    _rule(r"Errno 12\]|Cannot allocate memory", Outcome.OOM_HOST, "ENOMEM"),
    _rule(r"Errno 98\]|[Aa]ddress already in use", Outcome.PORT_IN_USE, "EADDRINUSE"),
)
# vLLM v1/engine/utils.py while it boots, v1/executor/multiproc_executor.py later (the server then ends with code 0)
CHILD_KILLED = re.compile(r"Failed core proc\(s\): \{[^}]*: -9\b|died unexpectedly \(exit code: -9\)")
ERROR_LINE = re.compile(r"^(\(.*?\) )?(ERROR .*?\] )?(?P<what>[\w.]*(Error|Exception|Exit)\b.*)$")
PREFIX = re.compile(r"^(\(.*?\) )?([A-Z]+ [\d-]+ [\d:.]+ (\[[^\]]*\] ?)?)?")  # vLLM's process name, level, time, file
POINTER = "root cause"  # vLLM's parent processes say where to look for their children's errors
REASON_CHARS = 400
ASKED_TO_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def classify(evidence: Evidence) -> Verdict:
    """The outcome of a server that did not become ready, or died later."""
    if match := SELFCHECK.search(evidence.log):
        return Verdict(Outcome.SELFCHECK_FAILED, _line_at(evidence.log, match.start()))
    if evidence.returncode is None:
        if evidence.timed_out:
            return Verdict(Outcome.BOOT_TIMEOUT, f"not ready in time; its last line: {_last_line(evidence.log)}")
        return Verdict(Outcome.CRASHED, f"not ready; its last line: {_last_line(evidence.log)}")
    if verdict := _killed_for_memory(evidence):
        return verdict
    for rule in LOG_RULES:
        if match := rule.pattern.search(evidence.log):
            return Verdict(rule.outcome, _line_at(evidence.log, match.start()))
    if -evidence.returncode in ASKED_TO_STOP:
        return Verdict(Outcome.INTERRUPTED, f"stopped by {signal.Signals(-evidence.returncode).name} from outside")
    how = _how_it_ended(evidence.returncode)
    return Verdict(Outcome.CRASHED, f"{how}: {_error_line(evidence.log)}")


def _killed_for_memory(evidence: Evidence) -> Verdict | None:
    killed = evidence.returncode == -signal.SIGKILL or CHILD_KILLED.search(evidence.log) is not None
    if evidence.group_oom_kills:
        count = evidence.group_oom_kills
        return Verdict(Outcome.OOM_HOST, f"the kernel killed {count} process(es) of this control group for memory")
    if not killed:
        return None
    if evidence.system_oom_kills:
        return Verdict(Outcome.OOM_HOST, "killed by SIGKILL while the kernel killed processes for memory")
    if evidence.system_oom_kills is None and evidence.group_oom_kills is None:
        return Verdict(Outcome.OOM_HOST, "killed by SIGKILL; the kernel gives no count, memory is the usual cause")
    what = "the server" if evidence.returncode == -signal.SIGKILL else "a process of the server"
    return Verdict(Outcome.CRASHED, f"{what} was killed by SIGKILL, and not by the kernel for memory")


def _how_it_ended(returncode: int) -> str:
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"


def _error_line(log: str) -> str:
    """The last line that names an exception and does not only point to another one, else the last line."""
    for line in reversed(log.splitlines()):
        match = ERROR_LINE.match(line.strip())
        if match and POINTER not in line:
            return match["what"][:REASON_CHARS]
    return _last_line(log)


def _last_line(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return _tidy(lines[-1]) if lines else "(no output)"


def _line_at(text: str, position: int) -> str:
    start = text.rfind("\n", 0, position) + 1
    end = text.find("\n", position)
    return _tidy(text[start : end if end >= 0 else len(text)])


def _tidy(line: str) -> str:
    return PREFIX.sub("", line.strip(), count=1)[:REASON_CHARS]
