"""vLLM's command-line flags as a person may write them: spellings, `=`, `--no-`, aliases, JSON and dotted JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tandem.errors import UsageError

ALIASES = {
    "-ac": "--attention-config",
    "-cc": "--compilation-config",
    "-dcp": "--decode-context-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpa": "--data-parallel-address",
    "-dpb": "--data-parallel-backend",
    "-dpe": "--data-parallel-external-lb",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpl": "--data-parallel-size-local",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-dpn": "--data-parallel-rank",
    "-dpp": "--data-parallel-rpc-port",
    "-dpr": "--data-parallel-start-rank",
    "-ep": "--enable-expert-parallel",
    "-pcp": "--prefill-context-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-q": "--quantization",
    "-sc": "--speculative-config",
    "-tp": "--tensor-parallel-size",
}
REPEATABLE = frozenset({"--middleware"})
_NUMBER = re.compile(r"^-\d")


class Flag(NamedTuple):
    """One flag of the command line."""

    name: str  # the long form, with dashes and without `no-`
    path: tuple[str, ...]  # ("a", "b") of `--name.a.b`
    values: tuple[str, ...]
    negated: bool  # `--no-name`
    tokens: tuple[str, ...]  # as written


def parse_flags(tokens: Sequence[str]) -> tuple[Flag, ...]:
    """Raises UsageError for a token that belongs to no flag and for a flag that is given twice."""
    flags: list[Flag] = []
    for token in tokens:
        if token.startswith("-") and len(token) > 1 and not _NUMBER.match(token):
            flags.append(_flag(token))
        elif not flags:
            raise UsageError(f"{token!r} is not a flag of vLLM; after `--` write flags, such as `-- --max-num-seqs 4`")
        else:
            last = flags[-1]
            flags[-1] = last._replace(values=(*last.values, token), tokens=(*last.tokens, token))
    seen: set[tuple[str, tuple[str, ...]]] = set()
    for flag in flags:
        key = (flag.name, flag.path)
        if key in seen and flag.name not in REPEATABLE:
            raise UsageError(f"vLLM flag {flag.name} is given twice; give it once")
        seen.add(key)
    return tuple(flags)


def given(flags: Iterable[Flag], *names: str) -> bool:
    return any(flag.name in names for flag in flags)


def value_of(flags: Iterable[Flag], name: str) -> str | None:
    """The last value given for `name`; None when the flag is not there or has no value."""
    for flag in flags:
        if flag.name == name and not flag.path and flag.values:
            return flag.values[-1]
    return None


def json_of(flags: Iterable[Flag], name: str) -> dict[str, Any]:
    """What `--name JSON` and `--name.a.b VALUE` state together, as one nested dict. Raises UsageError on bad JSON."""
    merged: dict[str, Any] = {}
    for flag in (flag for flag in flags if flag.name == name and flag.values):
        text = flag.values[-1]
        if flag.path:
            inner = merged
            for key in flag.path[:-1]:
                inner = inner.setdefault(key, {})
            inner[flag.path[-1]] = _loose_json(text)
            continue
        try:
            value = json.loads(text)
        except ValueError as problem:
            raise UsageError(f"vLLM flag {name}: {text!r} is not JSON ({problem})") from None
        if not isinstance(value, dict):
            raise UsageError(f"vLLM flag {name}: {text!r} is not a JSON object")
        merged.update(value)
    return merged


def dig(value: Any, *keys: str) -> Any:
    """value[k0][k1]...; None where a key is missing."""
    for key in keys:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def _flag(token: str) -> Flag:
    head, equals, value = token.partition("=")
    head, *path = head.split(".")
    if head.startswith("--"):
        head = "--" + head[2:].replace("_", "-")
    name = ALIASES.get(head, head)
    negated = name.startswith("--no-")
    if negated:
        name = "--" + name[len("--no-") :]
    return Flag(name, tuple(path), (value,) if equals else (), negated, (token,))


def _loose_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
