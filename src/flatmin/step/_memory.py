"""What a method remembers from step to step: vectors over the parameters, and noise that resumes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatmin.step._direction import Direction, Group


class Memory:
    """Named vectors over the parameters, beside the base's state.

    They cannot stand in the base's own state: Adam takes a parameter with any state for initialised. Keys are
    parameters and not their ids, so that a deep copy knows its own.
    """

    def __init__(self) -> None:
        self._vectors: dict[str, dict[Tensor, Tensor]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._vectors

    def put(self, name: str, direction: Direction) -> None:
        """Remember ``direction`` under ``name``; its tensors are kept, not copied."""
        self._vectors[name] = {
            parameter: value
            for bucket in direction
            for parameter, value in zip(bucket.parameters, bucket.values, strict=True)
        }

    def get(self, name: str, like: Direction) -> Direction:
        """A copy of the vector ``name`` on the parameters of ``like``, zero where nothing is remembered."""
        known = self._vectors.get(name, {})
        buckets = []
        for bucket in like:
            values = [
                known[parameter].to(value.device, value.dtype, copy=True)
                if parameter in known
                else torch.zeros_like(value)
                for parameter, value in zip(bucket.parameters, bucket.values, strict=True)
            ]
            buckets.append(bucket.with_values(values))
        return Direction(buckets)

    def state(self, groups: list[Group]) -> dict[str, dict[int, Tensor]]:
        """For a checkpoint: vectors by name, tensors by the parameter's place among all groups."""
        places = {parameter: place for place, parameter in enumerate(p for group in groups for p in group["params"])}
        return {
            name: {places[parameter]: value.clone() for parameter, value in vector.items() if parameter in places}
            for name, vector in self._vectors.items()
        }

    def load(self, state: dict[str, dict[int, Tensor]], groups: list[Group]) -> None:
        """Take back what :meth:`state` gave."""
        parameters = [p for group in groups for p in group["params"]]
        self._vectors = {
            name: {parameters[place]: value.to(parameters[place].device, copy=True) for place, value in vector.items()}
            for name, vector in state.items()
        }


class Noise:
    """Random vectors, the n-th of which depends on seed and n alone.

    Torch's own generators will not do: the step puts them back after its second pass, so that a model without
    dropout would get the same noise for ever.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.drawn = 0

    def normal(self, like: Direction) -> Direction:
        """A vector of independent standard normal entries on the parameters of ``like``."""
        return self._draw(like, lambda value, generator: value.normal_(generator=generator))

    def uniform(self, like: Direction) -> Direction:
        """A vector of independent entries, uniform on [0, 1), on the parameters of ``like``."""
        return self._draw(like, lambda value, generator: value.uniform_(generator=generator))

    def _draw(self, like: Direction, fill: Any) -> Direction:
        # Weyl's sequence: seeds of neighbouring draws must not be neighbours.
        number = (self.seed * 0x9E3779B97F4A7C15 + self.drawn * 0xBF58476D1CE4E5B9) % 2**63
        self.drawn += 1
        generators: dict[tuple[torch.device, int], torch.Generator] = {}
        buckets = []
        for bucket in like:
            device = bucket.values[0].device
            # Whole tensors get the same noise in every process, shards each their own.
            shard = sum(torch.distributed.get_rank(group) * 1009**n for n, group in enumerate(bucket.shards, 1))
            if (device, shard) not in generators:
                generators[device, shard] = torch.Generator(device).manual_seed((number + shard) % 2**63)
            values = [fill(torch.empty_like(value), generators[device, shard]) for value in bucket.values]
            buckets.append(bucket.with_values(values))
        return Direction(buckets)
