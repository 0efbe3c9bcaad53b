from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch, request):
    """Nothing here cuts the power, and syncing each small file would take most of these tests' time."""
    if "full" not in request.keywords:
        monkeypatch.setattr(os, "fsync", lambda _: None)
