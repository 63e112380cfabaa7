"""A weighted mixture of path models, itself a path model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from treeopt.errors import AcceptanceError
from treeopt.optimize.models import Child, PathModel
from treeopt.paths import Path

__all__ = ["MixtureModel"]


class MixtureModel:
    """Paths are accepted as in one of several domains, drawn with given weights.

    The probability of a path is the weighted mean of the domains', so the conditional of the next rank is that of the
    domains weighted by how likely each makes the path so far. Heads are no longer independent even where they are in
    every domain.

    Parameters
    ----------
    models : mapping of str to PathModel
    weights : mapping of str to float
        One for each domain, not negative; they are divided by their sum.

    Raises
    ------
    AcceptanceError
        For weights that name other domains, are negative or all 0.

    Examples
    --------
    >>> from treeopt.optimize.models import SiblingModel
    >>> easy, hard = SiblingModel([0.75], max_depth=2), SiblingModel([0.25], max_depth=2)
    >>> mixture = MixtureModel({"easy": easy, "hard": hard}, {"easy": 1, "hard": 1})
    >>> mixture.children(()), mixture.children((0,))
    ([(0.5, 0)], [(0.625, 0)])
    """

    def __init__(self, models: Mapping[str, PathModel], weights: Mapping[str, float]) -> None:
        unknown = sorted(set(weights) ^ set(models))
        if unknown:
            known = ", ".join(sorted(models))
            raise AcceptanceError(
                f"`{unknown[0]}` has a weight or a trace, but not both; give a weight to each of {known}"
            )
        for name, weight in weights.items():
            if not (math.isfinite(weight) and weight >= 0):
                raise AcceptanceError(f"`{name}` has weight {weight}; give a number from 0 on")
        total = math.fsum(weights.values())
        if total <= 0:
            raise AcceptanceError("all weights are 0; give at least one domain a positive weight")
        self.models = dict(models)
        self.weights = {name: weights[name] / total for name in models}
        self._joint: dict[Path, tuple[float, ...]] = {(): tuple(self.weights.values())}

    @property
    def num_levels(self) -> int:
        """Deepest level of any domain."""
        return max(model.num_levels for model in self.models.values())

    def children(self, path: Path) -> Sequence[Child]:
        """See `PathModel.children`."""
        joint = self._reached(path)
        total = math.fsum(joint)
        if total <= 0 or len(path) >= self.num_levels:
            return []
        rates: dict[int, float] = {}
        for weight, model in zip(joint, self.models.values()):
            if weight > 0:
                for rate, rank in model.children(path):
                    rates[rank] = rates.get(rank, 0.0) + weight / total * rate
        # A mean of numbers up to 1 can round to just above.
        return sorted(((min(rate, 1.0), rank) for rank, rate in rates.items()), key=lambda child: (-child[0], child[1]))

    def _reached(self, path: Path) -> tuple[float, ...]:
        """Return each domain's weight times its probability of a path."""
        if path not in self._joint:
            above = self._reached(path[:-1])
            self._joint[path] = tuple(
                weight * _rate(model, path) if weight > 0 else 0.0 for weight, model in zip(above, self.models.values())
            )
        return self._joint[path]


def _rate(model: PathModel, path: Path) -> float:
    return next((rate for rate, rank in model.children(path[:-1]) if rank == path[-1]), 0.0)
