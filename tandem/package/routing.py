"""How often a router picked each expert: what `tandem trace` writes and `tandem pack --routing` reads."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from tandem.errors import PackageError
from tandem.wire import Wire

ROUTING_SCHEMA: Literal["tandem/routing/1"] = "tandem/routing/1"


class Routing(Wire):
    """A routing histogram. `Routing(schema=ROUTING_SCHEMA, ...)`, in JSON under the key `schema` too."""

    model_config = ConfigDict(serialize_by_alias=True)

    schema_: Literal["tandem/routing/1"] = Field(alias="schema")
    origin: str  # what was traced, for people: "GSM8K train, 64 prompts, seed 0"
    tokens: int  # tokens that passed the routers
    layers: dict[str, tuple[int, ...]]  # layer index -> picks of each expert

    def counts(self, layer: int, num_experts: int) -> tuple[int, ...] | None:
        """The layer's histogram, or None when it was not traced. PackageError when it is of another model."""
        found = self.layers.get(str(layer))
        if found is None:
            return None
        if len(found) != num_experts or min(found) < 0:
            raise PackageError(
                f"the routing file has {len(found)} counts for layer {layer}, the checkpoint {num_experts} experts; "
                "trace this model"
            )
        return found


def most_routed(counts: tuple[int, ...] | None, num_experts: int) -> tuple[int, ...]:
    """All experts, most routed first, the lower index first among equals; index order without counts."""
    if counts is None:
        return tuple(range(num_experts))
    return tuple(sorted(range(num_experts), key=lambda expert: (-counts[expert], expert)))
