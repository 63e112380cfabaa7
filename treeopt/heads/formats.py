"""The layouts of names in Medusa checkpoints, and what a list of names says about the heads.

=======  ============================================  ==========================  ===================================
format   residual block                                output embedding            where
=======  ============================================  ==========================  ===================================
A        ``{head}.{layer}.linear.weight``, ``.bias``   ``{head}.{layers}.weight``  a file of its own
B        the same under a prefix                       the same under the prefix   beside a whole model, or alone
C        as A                                          the target's                a file of its own
D        ``blocks.{head}.layers.{layer}.weight``,      ``lm_heads.{head}.weight``  a file of its own, perhaps under a
         perhaps ``.bias``                                                         prefix
=======  ============================================  ==========================  ===================================

Any of them may hold a vocabulary map: ``token_map``, or ``d2t`` and perhaps ``t2d``.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from treeopt.errors import HeadsError

__all__ = ["BLOCKS_FIRST", "HEADS_FIRST", "MAP_NAMES", "Layout", "Names", "recognise"]

MAP_NAMES = ("token_map", "d2t", "t2d")
PREFIX = r"((?:[A-Za-z_]\w*\.)*)"


@dataclass(frozen=True, slots=True)
class Layout:
    """How a family of checkpoints names its tensors, behind any prefix.

    Attributes
    ----------
    block, lm_head : str
        Templates, to be filled with head, layer, kind (weight or bias), and layers.
    block_pattern, lm_head_pattern : re.Pattern
        The same for reading.
    """

    block: str
    lm_head: str
    block_pattern: re.Pattern[str]
    lm_head_pattern: re.Pattern[str]

    def names(self, num_heads: int, num_layers: int, *, lm_heads: bool, bias: bool = True) -> dict[str, str]:
        """Map the module's names to the file's."""
        found = {
            f"blocks.{head}.{layer}.linear.{kind}": self.block.format(head=head, layer=layer, kind=kind)
            for head in range(num_heads)
            for layer in range(num_layers)
            for kind in (("weight", "bias") if bias else ("weight",))
        }
        if lm_heads:
            found |= {
                f"lm_heads.{head}.weight": self.lm_head.format(head=head, layers=num_layers)
                for head in range(num_heads)
            }
        return found


HEADS_FIRST = Layout(
    "{head}.{layer}.linear.{kind}",
    "{head}.{layers}.weight",
    re.compile(PREFIX + r"(\d+)\.(\d+)\.linear\.(weight|bias)"),
    re.compile(PREFIX + r"(\d+)\.\d+\.weight"),
)
BLOCKS_FIRST = Layout(
    "blocks.{head}.layers.{layer}.{kind}",
    "lm_heads.{head}.weight",
    re.compile(PREFIX + r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"),
    re.compile(PREFIX + r"lm_heads\.(\d+)\.weight"),
)


@dataclass(frozen=True, slots=True)
class Names:
    """What the names of a checkpoint say.

    Attributes
    ----------
    format : {'A', 'B', 'C', 'D'}
    prefix : str
        With its dot; empty where there is none.
    num_heads, num_layers : int
    bias : bool
        Whether the blocks have one.
    tensors : dict of str to str
        The file's name of each tensor, by the module's. Heads that share one output embedding name the same tensor.
    maps : dict of str to str
        The file's name of each tensor of a vocabulary map, by its own last part.
    """

    format: str
    prefix: str
    num_heads: int
    num_layers: int
    bias: bool
    tensors: dict[str, str]
    maps: dict[str, str]

    @property
    def own_lm_heads(self) -> bool:
        """Whether the heads bring output embeddings."""
        return "lm_heads.0.weight" in self.tensors


def recognise(source: object, names: Collection[str], *, shared: bool = False) -> Names:
    """Find the heads among the names of a checkpoint.

    Parameters
    ----------
    source : object
        The file, for error texts.
    names : collection of str
        Heads alone, or thousands of a whole model with the heads among them.
    shared : bool
        Whether the configuration says that all heads of format D read one output embedding.

    Raises
    ------
    HeadsError
        If there are no heads, more than one set of them, or a tensor too few or too many, which is named.
    """
    layout, prefix = _layout_of(source, names)
    maps = {kind: name for kind in MAP_NAMES for name in (kind, prefix + kind) if name in names}
    beside_model = layout is HEADS_FIRST and bool(prefix)
    held = {name for name in names if name.startswith(prefix) or not beside_model} - set(maps.values())
    blocks = _matches(layout.block_pattern, held, prefix)
    lm_heads = _matches(layout.lm_head_pattern, held, prefix)
    unknown = sorted(held - set(blocks) - set(lm_heads))
    if unknown:
        raise HeadsError(f"`{source}` has the tensor `{unknown[0]}`, which no Medusa head has; give heads alone")
    num_heads = 1 + max(int(match[2]) for match in (*blocks.values(), *lm_heads.values()))
    num_layers = 1 + max(int(match[3]) for match in blocks.values())
    if num_heads * num_layers > len(held):
        raise HeadsError(
            f"`{source}` names head {num_heads - 1} but holds {len(held)} tensors; get the whole checkpoint again"
        )
    bias = layout is HEADS_FIRST or any(match[4] == "bias" for match in blocks.values())
    one = shared and layout is BLOCKS_FIRST and len(lm_heads) <= 1
    own = bool(lm_heads) or (layout is BLOCKS_FIRST and not one)
    tensors = layout.names(num_heads, num_layers, lm_heads=own, bias=bias)
    if one and own:
        tensors |= {name: "lm_heads.0.weight" for name in tensors if name.startswith("lm_heads.")}
    tensors = {name: prefix + original for name, original in tensors.items()}
    _compare(source, held, set(tensors.values()), num_layers)
    return Names(_letter(layout, prefix, own=own), prefix, num_heads, num_layers, bias, tensors, maps)


def _letter(layout: Layout, prefix: str, *, own: bool) -> str:
    if layout is BLOCKS_FIRST:
        return "D"
    return "B" if prefix else "A" if own else "C"


def _layout_of(source: object, names: Collection[str]) -> tuple[Layout, str]:
    """Return the layout and the prefix that the blocks are found under."""
    found = {
        (layout, match[1])
        for layout in (HEADS_FIRST, BLOCKS_FIRST)
        for name in names
        if (match := layout.block_pattern.fullmatch(name))
    }
    if not found:
        raise HeadsError(
            f"`{source}` holds no residual block (`0.0.linear.weight`); it is no checkpoint of Medusa heads"
        )
    if len(found) > 1:
        # A model may have blocks of its own that are named alike.
        found = {one for one in found if "medusa" in one[1]} or found
    if len(found) > 1:
        prefixes = " and ".join(f"`{prefix}`" for prefix in sorted(prefix for _, prefix in found))
        raise HeadsError(f"`{source}` holds residual blocks under {prefixes}; give a checkpoint with one set of heads")
    return found.pop()


def _matches(pattern: re.Pattern[str], names: Collection[str], prefix: str) -> dict[str, re.Match[str]]:
    found = {name: match for name in names if (match := pattern.fullmatch(name))}
    return {name: match for name, match in found.items() if match[1] == prefix}


def _compare(source: object, held: set[str], expected: set[str], num_layers: int) -> None:
    missing = sorted(expected - held)
    if missing:
        raise HeadsError(f"`{source}` lacks the tensor `{missing[0]}`; get the whole checkpoint again")
    extra = sorted(held - expected)
    if extra:
        raise HeadsError(f"`{source}` has `{extra[0]}` beside {num_layers} layers a head; it is not of one form")
