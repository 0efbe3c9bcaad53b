"""The streaming client: one chat request in, one record out. Nothing about a request is raised; it is recorded."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx

from tandem.errors import ServerError
from tandem_evals.records import Phase, RequestRecord, Scalar
from tandem_evals.task import Messages

CONNECT_TIMEOUT_S = 10.0
INFO_TIMEOUT_S = 10.0
RETRIES = 2  # after the first attempt, for a broken connection, a cut stream, 429 and 5xx
BACKOFF_S = 0.5  # doubled at each retry
ERROR_CHARS = 300


@dataclass(frozen=True, slots=True)
class Ask:
    """Which request this is, for its record."""

    index: int = 0
    item: str = ""
    epoch: int = 0
    boot: int = 0
    phase: Phase = "measured"


class ServerInfo(NamedTuple):
    """What a server says about itself."""

    model: str  # the name to ask for
    max_model_len: int | None
    profile: dict[str, Any] | None  # /tandem/profile; None: not a Tandem server
    stats: dict[str, Any] | None  # /tandem/stats

    @property
    def profile_sha256(self) -> str | None:
        """Of the profile that the engine runs; None: none, or not a Tandem server."""
        return None if self.profile is None else self.profile["profile_sha256"]

    @property
    def config_sha256(self) -> str | None:
        """Of the settings that the engine runs, default ones included; None: not a Tandem server."""
        return None if self.profile is None else self.profile["config_sha256"]


class _AttemptError(Exception):
    """One attempt that gave no whole reply."""

    def __init__(self, reason: str, again: bool) -> None:
        super().__init__(reason)
        self.again = again  # may another attempt help?


class _Reply:
    """What has arrived of one reply."""

    def __init__(self) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.arrivals_ns: list[int] = []
        self.counts: list[int] = []  # tokens so far, at each arrival
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.finish: str | None = None
        self.usage_seen = False

    def take(self, chunk: Mapping[str, Any], now_ns: int) -> None:
        """One chunk. It carries tokens when it has text, a finish reason, or a higher count than the chunk before."""
        if problem := chunk.get("error"):
            message = problem.get("message", problem) if isinstance(problem, dict) else problem
            raise _AttemptError(f"the server broke the stream off: {message}", again=True)
        before = self.completion_tokens
        usage = chunk.get("usage")
        if usage is not None:
            self.usage_seen = True
            self.prompt_tokens = usage["prompt_tokens"]
            self.completion_tokens = usage["completion_tokens"]
        if not chunk["choices"]:
            return
        choice = chunk["choices"][0]
        delta = choice["delta"]
        content = delta.get("content") or ""
        reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
        self.content.append(content)
        self.reasoning.append(reasoning)
        self.finish = choice.get("finish_reason") or self.finish
        if content or reasoning or choice.get("finish_reason") or self.completion_tokens > before:
            self.arrivals_ns.append(now_ns)
            self.counts.append(self.completion_tokens if usage is not None else -1)

    def chunk_ns(self) -> tuple[int, ...]:
        times = self.arrivals_ns
        return tuple(now - before for before, now in zip(times[:1] + times, times, strict=False))

    def chunk_tokens(self) -> tuple[int, ...]:
        """Empty unless the server gave a running count with every chunk."""
        if -1 in self.counts:
            return ()
        return tuple(now - before for before, now in zip([0, *self.counts], self.counts, strict=False))


def new_http(api_key: str | None = None) -> httpx.Client:
    """A client to share between requests. It ignores proxy settings: the servers asked here are on this network."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    return httpx.Client(headers=headers, trust_env=False, timeout=INFO_TIMEOUT_S)


def stream_chat(
    base_url: str,
    model: str,
    messages: Messages,
    *,
    max_tokens: int,
    seed: int,
    timeout_s: float,
    temperature: float = 0.0,
    ignore_eos: bool = False,
    extra: Mapping[str, Scalar] | None = None,
    ask: Ask | None = None,
    http: httpx.Client | None = None,
    retries: int = RETRIES,
) -> RequestRecord:
    """Ask once, streaming; the record's outcome is `unscored`, or `error` with the reason when no attempt gave a whole
    reply.

    base_url: with or without /v1. timeout_s: for a whole attempt; silence for so long ends it too, and a hang is not
    asked again. ignore_eos: always max_tokens tokens (vLLM). extra: more fields of the request body.
    """
    params: dict[str, Scalar] = {"temperature": temperature, "max_tokens": max_tokens, **(extra or {})}
    if ignore_eos:
        params["ignore_eos"] = True
    body = {
        "model": model,
        "messages": messages,
        "seed": seed,  # sent at temperature 0 too: it is part of what was asked
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        **params,
    }
    client = http or new_http()
    error: str | None = None
    reply = _Reply()
    attempts = 0
    try:
        while True:
            attempts += 1
            reply, error, t_send_ns = _Reply(), None, time.monotonic_ns()
            try:
                _stream(client, api_root(base_url) + "/chat/completions", body, timeout_s, reply)
                break
            except _AttemptError as failed:
                error = str(failed)[:ERROR_CHARS]
                if not failed.again or attempts > retries:
                    break
            time.sleep(BACKOFF_S * 2 ** (attempts - 1))
    finally:
        if http is None:
            client.close()
    ask = ask or Ask()
    return RequestRecord(
        index=ask.index,
        item=ask.item,
        epoch=ask.epoch,
        boot=ask.boot,
        phase=ask.phase,
        t_send_ns=t_send_ns,
        t_first_ns=reply.arrivals_ns[0] if reply.arrivals_ns else None,
        t_last_ns=reply.arrivals_ns[-1] if reply.arrivals_ns else None,
        chunk_ns=reply.chunk_ns(),
        chunk_tokens=reply.chunk_tokens(),
        prompt_tokens=reply.prompt_tokens,
        completion_tokens=reply.completion_tokens,
        finish=reply.finish,
        content="".join(reply.content),
        reasoning="".join(reply.reasoning),
        answer=None,
        outcome="unscored" if error is None else "error",
        error=error,
        attempts=attempts,
        seed=seed,
        params=params,
        counters={},
    )


def server_info(base_url: str, http: httpx.Client | None = None) -> ServerInfo:
    """Ask /v1/models, /tandem/profile and /tandem/stats. Raises ServerError when no OpenAI server answers."""
    client = http or new_http()
    root = api_root(base_url)
    try:
        models = _get(client, root + "/models")
        if models is None or not models.get("data"):
            raise ServerError(f"{base_url}: no model at /v1/models; is this an OpenAI-compatible server?")
        first = models["data"][0]
        plain_root = root.removesuffix("/v1")
        return ServerInfo(
            model=first["id"],
            max_model_len=first.get("max_model_len"),
            profile=_get(client, plain_root + "/tandem/profile"),
            stats=_get(client, plain_root + "/tandem/stats"),
        )
    except httpx.TransportError as problem:
        raise ServerError(f"{base_url}: no server answers ({problem}); start one with `tandem serve`") from None
    finally:
        if http is None:
            client.close()


def api_root(base_url: str) -> str:
    """`http://host:port`, with or without /v1 and slashes, as `http://host:port/v1`."""
    return base_url.rstrip("/").removesuffix("/v1") + "/v1"


def _get(client: httpx.Client, url: str) -> dict[str, Any] | None:
    """None for 404. Any other status than 200, and anything that is not a JSON object, raises ServerError."""
    response = client.get(url)
    if response.status_code == httpx.codes.NOT_FOUND:
        return None
    if response.status_code != httpx.codes.OK:
        raise ServerError(f"{url}: HTTP {response.status_code} {_message(response)}")
    try:
        return dict(response.json())
    except ValueError:
        raise ServerError(f"{url}: the answer is not a JSON object") from None


def _stream(client: httpx.Client, url: str, body: Mapping[str, Any], timeout_s: float, reply: _Reply) -> None:
    """Fill `reply`; raise _AttemptError unless the stream came to its end."""
    deadline = time.monotonic() + timeout_s
    timeout = httpx.Timeout(timeout_s, connect=min(CONNECT_TIMEOUT_S, timeout_s))
    try:
        with client.stream("POST", url, json=body, timeout=timeout) as response:
            if response.status_code != httpx.codes.OK:
                response.read()
                again = response.status_code >= 500 or response.status_code == httpx.codes.TOO_MANY_REQUESTS
                raise _AttemptError(f"HTTP {response.status_code}: {_message(response)}", again)
            for line in _lines(response):
                now_ns = time.monotonic_ns()
                if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                    reply.take(json.loads(line[5:]), now_ns)
                if time.monotonic() > deadline:
                    raise _AttemptError(f"no whole reply within {timeout_s:g} s", again=False)
    except httpx.ConnectTimeout as problem:
        raise _AttemptError(f"no connection: {problem}", again=True) from None
    except httpx.TimeoutException:
        raise _AttemptError(f"silence for {timeout_s:g} s", again=False) from None
    except httpx.TransportError as problem:
        raise _AttemptError(f"{type(problem).__name__}: {problem}", again=True) from None
    except (ValueError, KeyError, IndexError, TypeError) as problem:
        raise _AttemptError(f"not an OpenAI chat stream: {type(problem).__name__} {problem}", again=False) from None
    if reply.finish is None:
        raise _AttemptError("the stream ended before the reply did", again=True)
    if not reply.usage_seen:
        raise _AttemptError("the server gave no token counts (stream_options.include_usage)", again=False)


def _lines(response: httpx.Response) -> Iterator[bytes]:
    """Lines of an event stream. httpx's own splitter also breaks at U+2028, U+0085 and more, which JSON may hold."""
    rest = b""
    for part in response.iter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        yield from lines
    yield rest


def _message(response: httpx.Response) -> str:
    """The server's own words, in one line."""
    try:
        document = response.json()
        problem = document.get("error", document)
        text = str(problem.get("message", problem))
    except (ValueError, AttributeError):
        text = response.text
    return " ".join(text.split())[:ERROR_CHARS]
