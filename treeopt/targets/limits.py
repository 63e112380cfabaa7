"""What a target can take: its context, its sliding window, its architecture. Checked before any token is computed."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from treeopt.errors import TargetError

__all__ = ["check_architecture", "check_frequencies", "context_length", "head_dim", "room_for", "window_of"]

WINDOWS = {"gpt_neo": "window_size", "doge": "keep_window_size"}  # where it is not called sliding_window
IMPLICIT_POSITIONS = ("bloom", "mpt")  # ALiBi: a position is a place in the cache


def context_length(target: PreTrainedModel) -> int:
    """Return the most tokens a text of the target may have."""
    config: Any = target.config.get_text_config()
    return int(getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 1 << 30)


def room_for(target: PreTrainedModel, num_prompt_tokens: int, max_new_tokens: int) -> int:
    """Return how many new tokens fit behind a prompt, at most `max_new_tokens`.

    Raises
    ------
    TargetError
        If the prompt is empty or fills the context, or less than one new token is asked for.
    """
    if num_prompt_tokens < 1:
        raise TargetError("a prompt has no tokens; give at least one")
    if max_new_tokens < 1:
        raise TargetError(f"`max_new_tokens` is {max_new_tokens}; give at least 1")
    context = context_length(target)
    if num_prompt_tokens >= context:
        raise TargetError(
            f"a prompt has {num_prompt_tokens} tokens and fills the context of {context}; shorten it or leave it out"
        )
    return min(max_new_tokens, context - num_prompt_tokens)


def check_architecture(target: PreTrainedModel) -> None:
    """Refuse architectures whose positions or caches a tree cannot use.

    Raises
    ------
    TargetError
        Naming the architecture.
    """
    config: Any = target.config.get_text_config()
    if getattr(config, "alibi", False) or config.model_type in IMPLICIT_POSITIONS:
        raise TargetError(
            f"`{config.model_type}` takes positions from the order of its cache (ALiBi), which a tree does not have; "
            "use a target with explicit position ids"
        )
    if not getattr(config, "num_attention_heads", None):
        raise TargetError(f"`{config.model_type}` has no attention heads to mask; use a transformer with a KV cache")
    if chunk := getattr(config, "attention_chunk_size", None):
        raise TargetError(
            f"`{config.model_type}` attends in chunks of {chunk} positions, which a tree over a cache does not follow; "
            "use a target with full or sliding attention"
        )
    scale = getattr(config, "logit_scale", None)
    if isinstance(scale, (int, float)) and scale < 0:
        raise TargetError(f"`{config.model_type}` has logit_scale {scale}; a negative scale turns every ranking around")


def window_of(target: PreTrainedModel) -> int | None:
    """Return how many positions a token of the shortest-sighted layer looks back, or None where it sees all."""
    config: Any = target.config.get_text_config()
    window = getattr(config, WINDOWS.get(config.model_type, "sliding_window"), None)
    return int(window) if window and getattr(config, "use_sliding_window", True) else None


def check_frequencies(target: PreTrainedModel, shortest: int, longest: int) -> None:
    """Refuse texts that begin below the length at which a target's position frequencies change, and may end beyond.

    Such a target (longrope) chooses between two sets for a whole forward, by its farthest position: a tree or a longer
    text beside it would change those of all others.

    Parameters
    ----------
    target : PreTrainedModel
    shortest : int
        Tokens of the shortest prompt.
    longest : int
        Slots that texts and tree may take.

    Raises
    ------
    TargetError
        Naming the length.
    """
    config: Any = target.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [one for one in (rope, *rope.values()) if isinstance(one, dict)]
    if not any(one.get("rope_type", one.get("type")) == "longrope" for one in kinds):
        return
    stated = next(
        (one["original_max_position_embeddings"] for one in kinds if "original_max_position_embeddings" in one), 0
    )
    turn = stated or getattr(config, "original_max_position_embeddings", None)
    if turn and shortest <= turn < longest:
        raise TargetError(
            f"`{config.model_type}` has other position frequencies beyond {turn} tokens, and prompts of {shortest} tokens "
            f"with new ones and tree may take {longest}; use fewer new tokens, or prompts that are all longer"
        )


def head_dim(config: Any) -> int:
    """Return the size of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
