"""Does a tree pass through this target say what sequential forwards say? Asked once, before any token is decoded."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from treeopt.attention.passes import Pass
from treeopt.errors import TargetError, first_line
from treeopt.targets.cache import RowCache
from treeopt.targets.forward import Forward
from treeopt.targets.limits import context_length
from treeopt.tree import DraftTree
from treeopt.verify.acceptance import TreeIndex

__all__ = ["check_target"]

TREE = DraftTree.from_paths([(0,), (1,), (0, 0)])
PREFIX = 9
# Largest difference, of the largest logit. Flat positions are off by 1e-3 on a tiny random model in float32; rounding
# stays below 1e-5 there. Below float32 only gross errors can be told from rounding.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}  # a target's own eager attention has a float32 softmax
LOW_PRECISION = 0.1

_checked: WeakKeyDictionary[torch.nn.Module, set[str]] = WeakKeyDictionary()


@torch.inference_mode()
def check_target(forward: Forward) -> None:
    """Compare a tree of three drafts with the target's own forwards along its paths.

    Parameters
    ----------
    forward : Forward
        Of the target, with the attention backend that is to be trusted. Each pair is checked once a process.

    Raises
    ------
    TargetError
        If they differ by more than rounding, or the target gives no numbers.
    """
    kept = _checked.setdefault(forward.target, set())
    if forward.attention in kept:
        return
    prefix = max(1, min(PREFIX, context_length(forward.target) - TREE.max_depth - 1))
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(forward.vocabulary, (1, prefix + TREE.num_nodes), generator=generator).to(forward.device)
    text, nodes = drawn[:, :prefix], drawn[:, prefix:]
    try:
        tree = _tree_logits(forward, text, nodes)
        plain = torch.stack([_plain_logits(forward, text, nodes, path) for path in ([0, 1, 3], [0, 2, 2])])
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
        reason = first_line(error)
        raise TargetError(
            f"`{forward.target.config.model_type}` cannot be run with a tree over a cache ({reason}); use a causal transformer "
            "whose layers all keep keys and values"
        ) from error
    expected = torch.stack([plain[0, 0], plain[0, 1], plain[1, 1], plain[0, 2]])
    scale = float(expected.abs().max())
    difference = float((tree - expected).abs().max())
    if not difference <= TOLERANCE.get(forward.target.dtype, LOW_PRECISION) * scale:
        raise TargetError(
            f"`{forward.target.config.model_type}` with {forward.attention} attention gives a tree other logits than a "
            f"text (by {difference:.1e}, the largest being {scale:.1e}); choose another `attention`, or report the "
            "architecture and the version of transformers"
        )
    kept.add(forward.attention)


def _tree_logits(forward: Forward, text: Tensor, nodes: Tensor) -> Tensor:
    """Return (nodes, vocabulary), the prefix cached and the tree passed over it."""
    prefix, device = text.shape[1], forward.device
    index = TreeIndex.of(TREE, device)
    cache = RowCache(forward.target, 1, prefix + TREE.num_nodes)
    first = Pass.text(1, prefix, device)
    forward.hidden(text, first, cache.at(first))
    starts = torch.tensor([prefix], device=device)
    at = Pass(starts, index.depths, index.mask, prefix + TREE.num_nodes, prefix, words=index.words)
    return forward.true_logits(forward.hidden(nodes, at, cache.at(at)))[0].float()


def _plain_logits(forward: Forward, text: Tensor, nodes: Tensor, path: list[int]) -> Tensor:
    """Return the target's own logits after each node of a path, (path, vocabulary), without cache or tree."""
    whole = torch.cat([text, nodes[:, path]], dim=1)
    logits: Tensor = forward.target(whole, use_cache=False).logits
    return logits[0, text.shape[1] :].float()
