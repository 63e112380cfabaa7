"""The options of treeopt train, and the recipe file that may hold them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from treeopt import strictjson
from treeopt.cli.options import (
    MAX_SEED,
    device_map_option,
    device_option,
    dtype_option,
    prompts_option,
    target_option,
    timeout_option,
)
from treeopt.errors import DocumentError

__all__ = ["JOINT", "SCHEMA", "given", "recipe_of", "training_options"]

SCHEMA = "treeopt.recipe/1"
NAMES = {"prompts": "prompt_files", "heads": "heads_name"}  # where an option's name is not the parameter's

Command = TypeVar("Command", bound=Callable[..., Any])

# Options of the second stage, and the fields of JointSettings that they set.
JOINT = {
    "joint_epochs": "epochs",
    "joint_learning_rate": "learning_rate",
    "joint_warmup_steps": "warmup_steps",
    "joint_accumulate": "accumulate",
    "heads_rate": "heads_rate",
    "heads_weight": "heads_weight",
    "ramp": "ramp",
    "distill": "distill",
    "backbone": "backbone",
    "lora_rank": "lora_rank",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_modules": "lora_modules",
    "batch_tokens": "batch_tokens",
    "max_length": "max_length",
    "gradient_checkpointing": "gradient_checkpointing",
}


def _finite(ctx: click.Context, param: click.Parameter, value: float) -> float:
    """Refuse NaN, which no range does: every comparison with it is false."""
    if math.isnan(value):
        raise click.BadParameter(f"{value} is no rate", ctx, param)
    return value


def _read_recipe(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is None:
        return
    try:
        recipe = strictjson.parse(Path(value).read_bytes())
    except OSError as error:
        raise DocumentError(f"`{value}` cannot be read: {error.strerror}; give a recipe file") from error
    except ValueError as error:
        raise DocumentError(f"`{value}` is {error}; mend it") from error
    if not isinstance(recipe, dict) or recipe.get("schema") != SCHEMA:
        raise DocumentError(f'`{value}` is no recipe; give a JSON object with "schema": "{SCHEMA}"')
    known = {
        option.lstrip("-").replace("-", "_"): p
        for p in ctx.command.params
        for option in p.opts
        if option.startswith("--")
    }
    for name, content in recipe.items():
        if name == "schema":
            continue
        if name not in known or name == "recipe":
            raise DocumentError(f"`{value}`: `{name}` is no option of treeopt train; see treeopt train --help")
        if (wanted := _wanted(known[name], content)) is not None:
            raise DocumentError(f"`{value}`: `{name}` is {json.dumps(content)}; give {wanted}")
    # Values of the recipe become defaults, so that click checks them and the command line comes first.
    values: dict[str, Any] = {
        NAMES.get(str(name), str(name)): content for name, content in recipe.items() if name != "schema"
    }
    ctx.default_map = values


def _wanted(param: click.Parameter, content: Any) -> str | None:
    """Return what a recipe's value should be instead, where click would take another for it; click checks the rest."""
    number = isinstance(content, (int, float)) and not isinstance(content, bool)
    if param.multiple:
        good = isinstance(content, list) and all(isinstance(one, str) for one in content)
        return None if good else "a list of strings"
    if isinstance(param, click.Option) and param.is_flag:
        return None if isinstance(content, bool) else "true or false"
    if isinstance(param.type, click.IntRange):
        whole = number and (isinstance(content, int) or content.is_integer())
        return None if whole or isinstance(content, str) else "a whole number"
    if isinstance(param.type, click.FloatRange):
        return None if number or isinstance(content, str) else "a number"
    return None if isinstance(content, str) else "a string"


def _positive(default: int, text: str, least: int = 1) -> dict[str, Any]:
    return {"default": default, "show_default": True, "type": click.IntRange(least), "help": text}


def _rate(default: float, text: str, most: float = 1.0) -> dict[str, Any]:
    kind = click.FloatRange(0, most, min_open=True)
    return {"default": default, "show_default": True, "type": kind, "callback": _finite, "help": text}


def _choice(choices: list[str], text: str) -> dict[str, Any]:
    return {"type": click.Choice(choices), "default": choices[0], "show_default": True, "help": text}


OPTIONS = [
    click.option(
        "--recipe", metavar="FILE", is_eager=True, expose_value=False, callback=_read_recipe,
        help="JSON with any of these options, - as _; the command line comes first.",
    ),
    target_option,
    click.option("--method", **_choice(["medusa-1", "medusa-2"], "Heads on a frozen target, or then both together.")),
    device_option,
    device_map_option,
    dtype_option,
    click.option("--mixed-precision", **_choice(["no", "bf16", "fp16"], "As transformers' Trainer does it.")),
    prompts_option,
    click.option("--split", default="train", show_default=True, help="Prompts of this split; all if none is stated."),
    click.option("--limit", type=click.IntRange(1), help="Most prompts of each file, taken evenly."),
    click.option(
        "--continuations",
        **_choice(["generated", "dataset"], "Text of the target's own, or the assistant's turns in the prompt file."),
    ),
    click.option("--max-new-tokens", **_positive(256, "Most tokens a turn.", 2)),
    click.option("--batch-size", **_positive(64, "Prompts continued together.")),
    click.option("--heads", "heads_name", metavar="PATH_OR_ID", help="Heads to train further, instead of fresh ones."),
    click.option("--num-heads", **_positive(5, "Of fresh heads.")),
    click.option("--num-layers", **_positive(1, "Residual blocks a fresh head.")),
    click.option("--own-lm-heads/--no-own-lm-heads", default=False, help="Fresh heads get output embeddings of their own, trained too."),
    click.option("--epochs", **_positive(3, "Of the heads alone; 0 only with --heads.", 0)),
    click.option("--learning-rate", **_rate(2e-3, "Peak for the heads alone.")),
    click.option("--warmup-steps", **_positive(40, "Of the heads alone.")),
    click.option("--positions", **_positive(256, "Positions of one pass of the heads alone.")),
    click.option("--accumulate", **_positive(1, "Passes of one step.")),
    click.option("--joint-epochs", **_positive(1, "Medusa-2: of target and heads together.")),
    click.option("--joint-learning-rate", **_rate(2e-4, "The target's peak.")),
    click.option("--joint-warmup-steps", **_positive(40, "Of both together.")),
    click.option("--joint-accumulate", **_positive(1, "Passes of one step.")),
    click.option("--heads-rate", **_rate(4.0, "Times the target's rate for the heads.", 1e6)),
    click.option("--heads-weight", **_rate(0.2, "λ0: weight of the heads' loss.", 1e6)),
    click.option("--ramp", **_choice(["none", "sine"], "Whether λ0 rises from 0.")),
    click.option("--distill/--no-distill", default=False, help="Keep the target's distributions instead of learning the text."),
    click.option("--backbone", **_choice(["lora", "full"], "What of the target is trained.")),
    click.option("--lora-rank", **_positive(32, "")),
    click.option("--lora-alpha", **_positive(16, "")),
    click.option(
        "--lora-dropout", default=0.0, show_default=True, type=click.FloatRange(0, 1, max_open=True), callback=_finite,
    ),
    click.option(
        "--lora-modules", multiple=True, metavar="NAME",
        help="Last name of linear modules that get adapters; may be repeated.  [default: all]",
    ),
    click.option("--batch-tokens", **_positive(4096, "Tokens of one pass of both together.")),
    click.option("--max-length", **_positive(2048, "Tokens of a document for both together; longer ones are cut.", 2)),
    click.option("--gradient-checkpointing/--no-gradient-checkpointing", default=False, help="Less memory, one forward more."),
    click.option("--seed", type=click.IntRange(0, MAX_SEED), default=0, show_default=True, help="Seed of the order of the data."),
    click.option("--report-to", default="none", show_default=True, help="Also log to tensorboard, wandb, …, as Trainer does."),
    timeout_option,
    click.option("-o", "--output", required=True, type=click.Path(file_okay=False), help="Directory for the result."),
]  # fmt: skip


def training_options(command: Command) -> Command:
    """Add the options of treeopt train."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def given(ctx: click.Context, name: str) -> bool:
    """Return whether an option was given, on the command line or in the recipe."""
    return ctx.get_parameter_source(name) in (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP)


def recipe_of(ctx: click.Context) -> dict[str, Any]:
    """Return the recipe that would do the same: every option with its value, but for where it ran."""
    back = {parameter: option for option, parameter in NAMES.items()}
    left_out = {"output", "device", "device_map", "timeout", "report_to", "recipe"}
    values = {back.get(name, name): value for name, value in ctx.params.items() if name not in left_out}
    return {
        "schema": SCHEMA,
        **{n: list(v) if isinstance(v, tuple) else v for n, v in values.items() if v not in (None, ())},
    }
