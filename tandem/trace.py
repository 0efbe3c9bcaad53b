"""`tandem trace`: how often a running server's router picks each expert, over prompts like the ones it will serve.

The counts are differences of the server's own counters, so the server should have no other client meanwhile.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tandem.errors import ServerError, UsageError

HUB_DATASET = ("openai/gsm8k", "main", "train")
REQUEST_TIMEOUT_S = 600.0


class Prompts(NamedTuple):
    """Texts to send, and where they came from."""

    texts: tuple[str, ...]
    origin: str


class Snapshot(NamedTuple):
    """The server's counters at one moment."""

    package_sha256: str
    tokens: int
    layers: dict[str, list[int]]  # layer -> tokens routed to each expert


class Trace(NamedTuple):
    """What was routed between two snapshots."""

    tokens: int
    layers: dict[str, list[int]]


def load_prompts(path: Path | None, gsm8k: Path | None, count: int) -> Prompts:
    """`--prompts`: text, one prompt a line, or JSONL with `question`, `prompt` or `text`. Else GSM8K's train set,
    from a JSONL file or the datasets hub. Raises UsageError with what to pass when there is none."""
    if count < 1:
        raise UsageError(f"--n {count} is not a whole number of at least 1")
    if path is not None and gsm8k is not None:
        raise UsageError("--prompts and --gsm8k exclude each other")
    stated = path or gsm8k
    if stated is not None:
        return Prompts(spread(_read_file(stated), count), f"{stated.name}")
    return Prompts(spread(_hub_questions(), count), "openai/gsm8k train (datasets hub)")


def spread(texts: Sequence[str], count: int) -> tuple[str, ...]:
    """`count` of them, evenly over the whole."""
    take = min(count, len(texts))
    return tuple(texts[index * len(texts) // take] for index in range(take))


def _read_file(path: Path) -> list[str]:
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageError(f"{path}: {problem}") from None
    texts = [_text_of(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]
    if not texts:
        raise UsageError(f"{path}: holds no prompts")
    return texts


def _text_of(line: str, where: str) -> str:
    if not line.lstrip().startswith("{"):
        return line
    try:
        document = json.loads(line)
    except ValueError as problem:
        raise UsageError(f"{where}: not JSON ({problem})") from None
    for key in ("question", "prompt", "text"):
        if isinstance(document.get(key), str):
            return str(document[key])
    raise UsageError(f"{where}: no string `question`, `prompt` or `text`")


def _hub_questions() -> list[str]:
    remedy = "pass --gsm8k PATH (train.jsonl) or --prompts PATH"
    if importlib.util.find_spec("datasets") is None:
        raise UsageError(f"no prompts: the `datasets` package is not installed; {remedy}")
    from datasets import load_dataset

    name, config, split = HUB_DATASET
    try:
        rows = load_dataset(name, config, split=split)
    except Exception as problem:  # noqa: BLE001 - the hub's client raises whatever its transport does
        first = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        raise UsageError(f"no prompts: {name} is not reachable ({first}); {remedy}") from None
    return [str(row["question"]) for row in rows]


def take_snapshot(client: httpx.Client) -> Snapshot:
    """GET /tandem/routing. Raises ServerError when it is not a Tandem server."""
    document = _json(client, "GET", "/tandem/routing")
    if not document.get("layers"):
        raise ServerError(f"{client.base_url}: no rank reports routing; is it a server of a Tandem package?")
    return Snapshot(str(document["package_sha256"]), int(document["tokens"]), document["layers"])


def send_prompts(
    client: httpx.Client, prompts: Sequence[str], max_tokens: int, progress: Callable[[int], None] = lambda _: None
) -> None:
    """Send them one at a time as chats; a server whose model has no chat template gets them as plain completions."""
    model = str(_json(client, "GET", "/v1/models")["data"][0]["id"])
    chat = True
    for done, text in enumerate(prompts, 1):
        common = {"model": model, "max_tokens": max_tokens, "temperature": 0}
        if chat:
            body = {**common, "messages": [{"role": "user", "content": text}]}
            response = _send(client, "POST", "/v1/chat/completions", body)
            chat = not (response.status_code == 400 and "chat template" in response.text)
            if chat:
                _check(client, response)
        if not chat:
            _check(client, _send(client, "POST", "/v1/completions", {**common, "prompt": text}))
        progress(done)


def difference(before: Snapshot, after: Snapshot) -> Trace:
    """What was counted between the two. Raises ServerError when the server restarted in between."""
    tokens = after.tokens - before.tokens
    layers = {
        layer: [late - early for early, late in zip(before.layers[layer], counts, strict=True)]
        for layer, counts in after.layers.items()
    }
    if before.package_sha256 != after.package_sha256 or min(min(counts) for counts in layers.values()) < 0:
        raise ServerError("the server was restarted while its routing was recorded; run `tandem trace` again")
    if tokens < 1:
        raise ServerError("the server computed no tokens while its routing was recorded")
    return Trace(tokens, layers)


def _json(client: httpx.Client, method: str, path: str) -> dict[str, Any]:
    response = _send(client, method, path, None)
    _check(client, response)
    try:
        document = response.json()
    except ValueError:
        raise ServerError(f"{client.base_url}{path.lstrip('/')}: the answer is not JSON") from None
    if not isinstance(document, dict):
        raise ServerError(f"{client.base_url}{path.lstrip('/')}: the answer is not a JSON object")
    return document


def _send(client: httpx.Client, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
    try:
        return client.request(method, path, json=body)
    except httpx.HTTPError as problem:
        raise ServerError(f"{client.base_url}: {problem or type(problem).__name__}; is the server running?") from None


def _check(client: httpx.Client, response: httpx.Response) -> None:
    if response.status_code == 404 and response.url.path.startswith("/tandem/"):
        raise ServerError(
            f"{client.base_url}: no /tandem endpoints; start it with `tandem serve`, or name tandem in VLLM_PLUGINS"
        )
    if response.status_code != 200:
        raise ServerError(f"{response.url}: HTTP {response.status_code}: {response.text[:200]!r}")
