"""Trees from a trace: the model is counted, the objective chosen, the result certified, in one call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from treeopt.errors import AcceptanceError, TraceError, TreeoptError
from treeopt.optimize.build import best_tree_under, certified
from treeopt.optimize.built import BuiltTree
from treeopt.optimize.limits import Limits
from treeopt.optimize.mixture import MixtureModel
from treeopt.optimize.models import HeadModel, JointModel, PathModel, path_probabilities
from treeopt.optimize.noise import Sample
from treeopt.optimize.otherwise import robust_tree, typical_tree
from treeopt.optimize.passing import PassingModel
from treeopt.trace import RankTrace
from treeopt.typical import DELTA, EPSILON, passing_guesses

__all__ = ["MODELS", "OBJECTIVES", "Aim", "counted_model", "tree_from_trace"]

MODELS = ("independent", "joint")
OBJECTIVES = ("expected-accepted", "mixture", "robust", "typical")


@dataclass(frozen=True)
class Aim:
    """What a tree from a trace is chosen by.

    Attributes
    ----------
    model : {'independent', 'joint'}
        Accuracies of each head, or counts of whole paths shrunk toward them; see `JointModel`.
    objective : {'expected-accepted', 'mixture', 'robust', 'typical'}
        E[L] over all positions, over domains of given weights, in the worst domain, or under typical acceptance.
    weights : mapping of str to float, optional
        Of the domains of a mixture.
    epsilon, delta : float
        Of typical acceptance; see `treeopt.typical.typical_threshold`.
    """

    model: str = "independent"
    objective: str = "expected-accepted"
    weights: Mapping[str, float] | None = None
    epsilon: float = EPSILON
    delta: float = DELTA

    def __post_init__(self) -> None:
        for name, given, known in (("model", self.model, MODELS), ("objective", self.objective, OBJECTIVES)):
            if given not in known:
                raise AcceptanceError(f"`{name}` is {given!r}; give one of {', '.join(known)}")
        if (self.weights is not None) != (self.objective == "mixture"):
            raise AcceptanceError(
                f"`weights` belong to `objective` mixture, which is {self.objective}; give both or neither"
            )


def tree_from_trace(
    trace: RankTrace,
    limits: Limits,
    aim: Aim | None = None,
    *,
    seed: int = 0,
    provenance: Mapping[str, str] | None = None,
    certify: bool = True,
) -> BuiltTree:
    """Count a trace, search and certify.

    Parameters
    ----------
    trace : RankTrace
    limits : Limits
    aim : Aim, optional
    seed : int
        Of the bootstrap over documents.
    provenance : mapping of str to str, optional
        Kept in the result, with what the aim adds.
    certify : bool
        Whether to add the sampling noise, which takes about a second for a large trace.

    Returns
    -------
    BuiltTree

    Raises
    ------
    TraceError
        If the trace lacks what the aim needs: domains, or the target's probabilities.

    Examples
    --------
    >>> trace = RankTrace(ranks=[[0, 0], [0, -1], [-1, -1]] * 2, documents=[0, 3, 6])
    >>> tree_from_trace(trace, Limits(num_nodes=3)).tree.paths
    ((), (0,), (0, 0))
    """
    aim = aim or Aim()
    model, sample = counted_model(trace, aim.model)
    provenance = {**(provenance or {}), **_stated(aim, sample)}
    samples = [sample]
    if aim.objective == "typical":
        passing = PassingModel(passing_guesses(trace, aim.epsilon, aim.delta))
        built = typical_tree(limits, passing, model, provenance=provenance)
    elif aim.objective == "expected-accepted":
        built = best_tree_under(limits, model, provenance=provenance)
    else:
        models, domain_samples = _by_domain(trace, aim)
        if aim.objective == "robust":
            built = robust_tree(limits, models, model, provenance=provenance)
        else:
            model = MixtureModel(models, aim.weights or {})
            samples = [replace(domain_samples[name], weight=weight) for name, weight in model.weights.items()]
            built = _mixed(best_tree_under(limits, model, provenance=provenance), models)
    return certified(built, model, samples, seed=seed) if certify else built


def counted_model(trace: RankTrace, model: str) -> tuple[PathModel, Sample]:
    """Return the path model of a name, counted on a trace, and the sample it was counted on."""
    if model == "independent":
        return HeadModel(trace.table()), Sample(trace)
    joint = JointModel.fit(trace)
    return joint.simplest(), Sample(trace, joint.strengths)


def _by_domain(trace: RankTrace, aim: Aim) -> tuple[dict[str, PathModel], dict[str, Sample]]:
    names = sorted(set(trace.domains or ()))
    if len(names) < 2:
        raise TraceError(
            f"the trace has {len(names) or 'no'} domains, and `objective` {aim.objective} needs two; calibrate on prompts with a "
            "`domain` each"
        )
    wanted = sorted(aim.weights) if aim.weights is not None else names
    models, samples = {}, {}
    for name in wanted:
        try:
            models[name], samples[name] = counted_model(trace.domain(name), aim.model)
        except TreeoptError as error:
            raise TraceError(f"domain `{name}`: {error}") from error
    return models, samples


def _mixed(built: BuiltTree, models: Mapping[str, PathModel]) -> BuiltTree:
    parts = {name: float(path_probabilities(model, built.tree)[1:].sum()) for name, model in models.items()}
    return replace(built, certificate=replace(built.certificate, objective="mixture", parts=parts))


def _stated(aim: Aim, sample: Sample) -> dict[str, str]:
    """Return what a tree file says of the aim beside the objective's name."""
    stated = {"model": aim.model}
    if sample.strengths is not None:
        stated["strengths"] = ", ".join(f"{strength:g}" for strength in sample.strengths)
    if aim.weights is not None:
        stated["weights"] = ", ".join(f"{name} {weight:g}" for name, weight in sorted(aim.weights.items()))
    if aim.objective == "typical":
        stated |= {"epsilon": f"{aim.epsilon:g}", "delta": f"{aim.delta:g}"}
    return stated
