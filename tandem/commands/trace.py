"""`tandem trace`: record a routing histogram from a running server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from tandem.console import emit_json, say
from tandem.trace import REQUEST_TIMEOUT_S, difference, load_prompts, send_prompts, take_snapshot


def register(app: typer.Typer) -> None:
    app.command(name="trace")(trace)


def trace(
    url: Annotated[str, typer.Argument(help="The server, such as http://127.0.0.1:8000.")],
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("routing.json"),
    prompts: Annotated[Path | None, typer.Option(help="Prompts: text, one a line, or JSONL.")] = None,
    gsm8k: Annotated[Path | None, typer.Option(help="GSM8K's train.jsonl. Default: the datasets hub.")] = None,
    n: Annotated[int, typer.Option(help="How many prompts, spread evenly over the file.")] = 64,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.")] = 128,
    api_key: Annotated[str | None, typer.Option(help="The server's API key; or $VLLM_API_KEY.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the document on stdout too.")] = False,
) -> None:
    """Record how often each expert is picked, for `tandem pack --routing`.

    GSM8K train questions are sent one at a time; nothing else should use the server meanwhile.
    """
    import httpx

    from tandem.package.routing import ROUTING_SCHEMA, Routing

    chosen = load_prompts(prompts, gsm8k, n)
    key = api_key or os.environ.get("VLLM_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=url, timeout=REQUEST_TIMEOUT_S, headers=headers) as client:
        before = take_snapshot(client)
        say(f"sending {len(chosen.texts)} prompts from {chosen.origin} to {url}")
        send_prompts(client, chosen.texts, max_tokens, lambda done: _progress(done, len(chosen.texts)))
        recorded = difference(before, take_snapshot(client))
    origin = f"{len(chosen.texts)} prompts from {chosen.origin}, max_tokens {max_tokens}"
    layers = {layer: tuple(counts) for layer, counts in recorded.layers.items()}
    document = Routing(schema=ROUTING_SCHEMA, origin=origin, tokens=recorded.tokens, layers=layers)
    document.write(out)
    say(f"wrote {out}: {recorded.tokens} tokens, {len(recorded.layers)} layers ({origin})")
    if as_json:
        emit_json(document.model_dump(mode="json", by_alias=True))


def _progress(done: int, total: int) -> None:
    if done == total or done % 8 == 0:
        say(f"{done}/{total}")
