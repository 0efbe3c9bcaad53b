"""The server's own endpoints: GET /tandem/profile, /tandem/stats, /tandem/routing and /tandem/metrics.

An endpoint plugin of vLLM: it lives in the API server and reads the ranks' shared-memory pages, so that a request costs
the engine nothing. vLLM loads it when `VLLM_PLUGINS` names `tandem`, which `tandem serve` sees to.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from tandem import stats
from tandem.config import ResolvedConfig
from tandem.errors import TandemError
from tandem.profile import Profile, engine_config

Settings = tuple[ResolvedConfig, Profile | None]
Body = Callable[[list[stats.RankStats], Settings], dict[str, Any]]


class TandemEndpoints:
    """vLLM's `EndpointPlugin`."""

    name = "tandem"
    required_tasks = None

    def attach_router(self, app: Any) -> None:
        from fastapi.responses import JSONResponse, Response

        def answer(body: Body) -> JSONResponse:
            settings: Settings | str | None = getattr(app.state, "tandem", None)
            if settings is None:
                return JSONResponse({"error": "the engine is still starting"}, status_code=503)
            if isinstance(settings, str):
                return JSONResponse({"error": settings}, status_code=500)
            document = body(find_ranks(), settings)
            return JSONResponse(document, status_code=500 if document.get("state") == "error" else 200)

        for name, body in BODIES.items():
            app.add_api_route(f"/tandem/{name}", partial(answer, body), methods=["GET"], response_model=None)

        def metrics() -> Response:
            return Response(metrics_text(), media_type="text/plain; version=0.0.4; charset=utf-8")

        app.add_api_route("/tandem/metrics", metrics, methods=["GET"], response_model=None)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:  # noqa: ARG002
        """Read the settings that the ranks were told to read too."""
        if engine_client is None:
            state.tandem = "this server has no engine"
            return
        try:
            state.tandem = engine_config(engine_client.vllm_config.additional_config)
        except TandemError as problem:
            state.tandem = f"{type(problem).__name__}: {problem}"


def plugin() -> TandemEndpoints:
    """The entry point of `vllm.endpoint_plugins`."""
    return TandemEndpoints()


def find_ranks() -> list[stats.RankStats]:
    """The ranks that this API server's process started; with several API servers their common parent started them."""
    return stats.read_ranks(os.getpid()) or stats.read_ranks(os.getppid())


def profile_body(ranks: list[stats.RankStats], settings: Settings) -> dict[str, Any]:
    """Which settings run, where each came from, and whether every rank says the same."""
    resolved, profile = settings
    config_sha256 = resolved.config.sha256
    profile_sha256 = None if profile is None else profile.sha256
    problems = stats.agreement(ranks, config_sha256, profile_sha256)
    return {
        "state": "error" if problems else "ok",
        "problems": problems,
        "profile_sha256": profile_sha256,
        "profile_id": None if profile is None else profile.id,
        "config_sha256": config_sha256,
        "settings": dataclasses.asdict(resolved.config),
        "origins": dict(resolved.origins),
        "ranks": [{"pid": page.pid, **page.identity._asdict()} for page in ranks],
    }


def stats_body(ranks: list[stats.RankStats], settings: Settings) -> dict[str, Any]:  # noqa: ARG001
    """Every rank's counters since its boot."""
    return {
        "ranks": [
            {
                "rank": page.identity.rank,
                "pid": page.pid,
                "threads": page.identity.threads,
                "fp4_top": page.identity.fp4_top,
                "shared_cores": page.identity.shared_cores,
                "pinning_errors": page.identity.pinning_errors,
                "config_sha256": page.identity.config_sha256,
                "profile_sha256": page.identity.profile_sha256,
                "package_sha256": page.identity.package_sha256,
                "counters": page.counters,
            }
            for page in ranks
        ]
    }


def routing_body(ranks: list[stats.RankStats], settings: Settings) -> dict[str, Any]:  # noqa: ARG001
    """Tokens routed to each expert since boot: rank 0's counts, since every rank sees every token."""
    first = next((page for page in ranks if page.identity.rank == 0), None)
    if first is None:
        return {"package_sha256": None, "tokens": 0, "layers": {}}
    return {
        "package_sha256": first.identity.package_sha256,
        "tokens": first.counters["tokens"],
        "layers": {str(layer): counts for layer, counts in sorted(first.routing.items())},
    }


BODIES: dict[str, Body] = {"profile": profile_body, "stats": stats_body, "routing": routing_body}


def metrics_text() -> bytes:
    """The counters in Prometheus's format, one series a rank. vLLM's own /metrics merges files of its processes in a
    registry that takes no further collector, so these have a path of their own."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(Collector())
    return bytes(generate_latest(registry))


class Collector:
    """The counters at the moment of a scrape."""

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import CounterMetricFamily

        ranks = find_ranks()
        for name in stats.COUNTERS:
            family = CounterMetricFamily(f"tandem:{name}", f"Tandem: {name} since boot.", labels=["rank"])
            for page in ranks:
                family.add_metric([str(page.identity.rank)], page.counters[name])
            yield family
