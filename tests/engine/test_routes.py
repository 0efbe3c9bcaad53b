"""The endpoints of the API server, on pages of this process."""

from __future__ import annotations

import argparse
import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tandem import routes, stats
from tandem.config import TandemConfig
from tests.engine.test_stats import identity

fastapi = pytest.importorskip("fastapi")


@pytest.fixture
def page() -> stats.StatsPage:
    return stats.StatsPage(identity(config=TandemConfig().sha256), [(0, 3), (1, 3)])


def client(additional_config: dict[str, Any] | None, start: bool = True) -> Any:
    from fastapi.testclient import TestClient

    app = fastapi.FastAPI()
    plugin = routes.plugin()
    plugin.attach_router(app)
    if start:
        engine = SimpleNamespace(vllm_config=SimpleNamespace(additional_config=additional_config))
        asyncio.run(plugin.init_state(engine, app.state, argparse.Namespace()))
    return TestClient(app)


@pytest.mark.usefixtures("page")
def test_profile_when_all_agree() -> None:
    answer = client({}).get("/tandem/profile")
    assert answer.status_code == 200
    body = answer.json()
    assert (body["state"], body["problems"], body["profile_sha256"]) == ("ok", [], None)
    assert body["settings"]["reserve_cores"] == TandemConfig().reserve_cores
    assert body["origins"]["pinning"] == "default"
    assert body["ranks"][0]["config_sha256"] == body["config_sha256"] == TandemConfig().sha256


@pytest.mark.usefixtures("page")
def test_profile_when_a_rank_runs_other_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        routes, "engine_config", lambda _: (SimpleNamespace(config=TandemConfig(smt=True), origins={}), None)
    )
    answer = client({}).get("/tandem/profile")
    assert answer.status_code == 500
    assert answer.json()["state"] == "error"
    assert "of the API server" in answer.json()["problems"][0]


def test_stats_routing_and_metrics(page: stats.StatsPage) -> None:
    page.add("tokens", 5)
    page.route(1, np.array([4, 0, 6]))
    server = client(None)
    assert server.get("/tandem/stats").json()["ranks"][0]["counters"]["tokens"] == 5
    routing = server.get("/tandem/routing").json()
    assert routing["tokens"] == 5
    assert routing["layers"] == {"0": [0, 0, 0], "1": [4, 0, 6]}
    assert 'tandem:tokens_total{rank="0"} 5.0' in server.get("/tandem/metrics").text


@pytest.mark.usefixtures("page")
def test_before_the_engine_and_with_settings_that_cannot_be_read() -> None:
    assert client({}, start=False).get("/tandem/stats").status_code == 503
    answer = client({"tandem": {"threads": 3}}).get("/tandem/profile")
    assert answer.status_code == 500
    assert "unknown key tandem.threads" in answer.json()["error"]
