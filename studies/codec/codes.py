"""The codes of the study under the keys that results and tables use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from studies.codec.additive import AdditiveCode
from studies.codec.base import Code
from studies.codec.lattice import LatticeCode
from studies.codec.product import ProductCode
from studies.codec.signs import SignsCode
from studies.codec.sliding import SlidingCode
from studies.codec.trellis import TrellisCode

CODES: Final[Mapping[str, Callable[[], Code]]] = {
    "product": ProductCode,
    "signs": SignsCode,
    "e8p": LatticeCode,
    "additive": AdditiveCode,
    "trellis": TrellisCode,
    "sac": SlidingCode,
}
RETRAINABLE: Final = ("product",)
