"""Tandem: Mixture-of-Experts models that do not fit your VRAM, as a plugin of stock vLLM."""

from __future__ import annotations

from tandem.capabilities import Capabilities, capabilities
from tandem.versions import TANDEM as __version__  # noqa: N811

__all__ = ["Capabilities", "__version__", "capabilities"]
