"""Tree decoding as transformers' `generate` calls it, or by itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    GenerationConfig,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    PreTrainedModel,
    StoppingCriteriaList,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from treeopt.document import read_tree
from treeopt.errors import TargetError
from treeopt.heads.medusa import MedusaHeads
from treeopt.optimize.built import BuiltTree
from treeopt.tree import DraftTree
from treeopt.verify.acceptance import Acceptance, Greedy
from treeopt.verify.sampling import Sample
from treeopt.verify.texts import padded, unpadded
from treeopt.verify.verifier import TreeVerifier

__all__ = ["decode"]

DEFAULT_NEW_TOKENS = 64
OF_A_BATCH = (
    PrefixConstrainedLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    EncoderNoRepeatNGramLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
MOST_FRAMES = 8  # between `decode` and the `generate` that called it: wrappers that switch gradients off


def decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    *,
    tree: DraftTree | BuiltTree | str | Path,
    heads: MedusaHeads | str | Path,
    acceptance: Acceptance | None = None,
    attention: str = "auto",
    streamer: Any = None,
    **keywords: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Decode prompts with a draft tree.

    By itself, or as ``model.generate(ids, custom_generate=treeopt.decode, tree=tree, heads=heads)``, with everything
    that `generate` takes beside: its processors, stopping criteria and streamer.

    Parameters
    ----------
    model : PreTrainedModel
    input_ids : Tensor of int64, shape (batch, prompt)
    logits_processor : LogitsProcessorList, optional
        Given the true text that leads to each node they are asked about.
    stopping_criteria : StoppingCriteriaList, optional
        Asked at every new token, without scores.
    generation_config : GenerationConfig, optional
        `do_sample`, `max_new_tokens` or `max_length`, `eos_token_id` and `pad_token_id` are read. Temperature, top-k and
        top-p come through `logits_processor`, as `generate` passes them.
    tree : DraftTree, BuiltTree, str or Path
        A tree or its file.
    heads : MedusaHeads, str or Path
        Heads or their checkpoint.
    acceptance : Acceptance, optional
        By default sampling where `generation_config.do_sample` is set, else greedy.
    attention : str
        See `TreeVerifier`.
    streamer : BaseStreamer, optional
        For a batch of one prompt.
    **keywords
        `attention_mask`, (batch, prompt), 0 where a prompt is padded, and `max_new_tokens`, 64 by default. What else
        `generate` prepares for the model is not used.

    Returns
    -------
    Tensor of int64, shape (batch, prompt + new)
        Or what holds it as `sequences`, where `generation_config.return_dict_in_generate` is set.

    Raises
    ------
    TargetError
        If something is asked for that tree decoding does not do: beams, a streamed batch, scores, embeddings as prompt,
        processors that look at a whole batch.
    """
    # Arguments of these names must not stand in the signature: `generate` would take them for ours and not read them.
    attention_mask, asked = keywords.get("attention_mask"), keywords.get("max_new_tokens")
    config = GenerationConfig() if generation_config is None else generation_config
    if streamer is None:
        streamer = _streamer_of_generate()
    else:
        streamer.put(input_ids.cpu())
    _check(config, streamer, len(input_ids), keywords)
    _check_processors(logits_processor or (), len(input_ids))
    verifier = TreeVerifier(
        model,
        heads if isinstance(heads, MedusaHeads) else MedusaHeads.load(heads, model),
        _tree(tree),
        acceptance=acceptance or (Sample() if config.do_sample else Greedy()),
        attention=attention,
    )
    if generation_config is not None:
        verifier.eos_ids = frozenset([] if config.eos_token_id is None else _listed(config.eos_token_id))
    prompts = unpadded(input_ids, attention_mask)
    decoded = verifier.decode(
        prompts,
        _room(generation_config, input_ids, asked),
        processors=logits_processor or None,
        shown=input_ids.tolist(),
        stop=_stop(input_ids, stopping_criteria) if stopping_criteria else None,
        heard=None if streamer is None else lambda _row, tokens: streamer.put(torch.tensor(tokens)),
    )
    if streamer is not None:
        streamer.end()
    pad = config.pad_token_id
    if pad is None:
        pad = verifier.pad_id() if config.eos_token_id is None else _listed(config.eos_token_id)
    pad = _listed(pad)[0]
    sequences = padded(input_ids, [row.tokens for row in decoded], pad)
    return GenerateDecoderOnlyOutput(sequences=sequences) if config.return_dict_in_generate else sequences


def _streamer_of_generate() -> Any:
    """Return the streamer of the `generate` that calls, which has put the prompt into it.

    transformers (4.57 to 5.24) hands a callable its own arguments only and drops the streamer.
    """
    frame = sys._getframe()
    for _ in range(MOST_FRAMES):
        if frame.f_back is None:
            return None
        frame = frame.f_back
        if frame.f_code.co_name == "generate" and "custom_generate" in frame.f_locals:
            return frame.f_locals.get("streamer")
    return None


def _check(config: GenerationConfig, streamer: Any, num_rows: int, keywords: Mapping[str, Any]) -> None:
    for name in (
        "penalty_alpha",
        "dola_layers",
        "output_scores",
        "output_logits",
        "output_attentions",
        "output_hidden_states",
    ):
        if getattr(config, name, None):
            raise TargetError(f"`{name}` is {getattr(config, name)!r}, which tree decoding does not do; leave it out")
    if keywords.get("inputs_embeds") is not None:
        raise TargetError("`inputs_embeds` is given, but tree decoding reads tokens; give input ids alone")
    if (config.num_beams or 1) > 1:
        raise TargetError(f"`num_beams` is {config.num_beams}; tree decoding follows one sequence a prompt, give 1")
    if streamer is not None and num_rows > 1:
        raise TargetError(f"a streamer takes one prompt, not a batch of {num_rows}; decode them one by one")


def _tree(tree: DraftTree | BuiltTree | str | Path) -> DraftTree:
    if isinstance(tree, (str, Path)):
        tree = read_tree(tree)
    return tree.tree if isinstance(tree, BuiltTree) else tree


def _room(config: GenerationConfig | None, input_ids: Tensor, asked: int | None) -> int:
    """Return how many new tokens are asked for."""
    if asked is None and config is not None:
        asked = config.max_new_tokens
        if asked is None and config.max_length is not None:
            asked = config.max_length - input_ids.shape[1]
    return DEFAULT_NEW_TOKENS if asked is None else asked


def _check_processors(processors: Iterable[Any], num_rows: int) -> None:
    """Refuse processors that know the rows of a batch by their place: here a row is looked at by itself."""
    for processor in processors if num_rows > 1 else ():
        ignored = getattr(processor, "prompt_ignore_length", None)
        if isinstance(processor, OF_A_BATCH) or isinstance(ignored, torch.Tensor):
            raise TargetError(
                f"`{type(processor).__name__}` looks at all {num_rows} prompts of the batch at once; decode them one by one"
            )


def _stop(input_ids: Tensor, criteria: StoppingCriteriaList) -> Callable[[int, list[int]], bool]:
    """Return the question whether a row's text ends, as the criteria of transformers answer it; they see the padded row."""
    rows = input_ids.tolist()

    def ends(row: int, new: list[int]) -> bool:
        text = torch.tensor([[*rows[row], *new]], device=input_ids.device)
        return bool(torch.as_tensor(criteria(text, None)).all())

    return ends


def _listed(value: Any) -> list[int]:
    return [int(one) for one in torch.as_tensor(value).reshape(-1).tolist()]
