"""Options that several commands share, and what they resolve to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from treeopt import strictjson
from treeopt.bundled import DEMO_HEADS, DEMO_PROMPTS, calibration_path
from treeopt.errors import DocumentError, HeadsError, require_module

if TYPE_CHECKING:
    from treeopt.heads import MedusaHeads
    from treeopt.targets.loading import LoadedTarget
    from treeopt.verify import TreeVerifier

__all__ = [
    "MAX_SEED",
    "WholeOrAuto",
    "attention_option",
    "attention_used",
    "device_map_option",
    "device_option",
    "dtype_option",
    "heads_path",
    "kind_of",
    "load_models",
    "prompts_option",
    "prompts_path",
    "require_one_placement",
    "require_torch",
    "seed_option",
    "target_option",
    "target_options",
    "timeout_option",
]

MAX_SEED = (1 << 32) - 1
CUDA_BACKENDS = ("triton", "flex")  # that they do not serve a CPU is no news
TORCH_SIDE = ("torch", "transformers", "gguf", "tqdm")

Command = TypeVar("Command", bound=Callable[..., Any])


class WholeOrAuto(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2 only
    """A whole number from 1, or auto, which becomes None."""

    name = "INTEGER|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        """Read the option's text."""
        if value == "auto":
            return None
        if not str(value).isdecimal() or int(value) < 1:
            self.fail(f"{value!r} is neither auto nor a whole number from 1", param, ctx)
        return int(value)


target_option = click.option(
    "--target", default="demo", show_default=True, metavar="PATH_OR_ID",
    help="A Hugging Face directory or hub id; demo is SmolLM2-135M-Instruct, fetched once.",
)  # fmt: skip

device_option = click.option(
    "--device", default="auto", show_default=True, help="cpu, cuda, cuda:1, …; auto is cuda if there is one."
)

dtype_option = click.option(
    "--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto", show_default=True,
    help="auto is float32 on a CPU, the checkpoint's own on a GPU.",
)  # fmt: skip

prompts_option = click.option(
    "--prompts", "prompt_files", multiple=True, type=click.Path(dir_okay=False),
    help="Prompt file: .jsonl, ShareGPT .json or .txt; may be repeated.  [default: the bundled chat prompts]",
)  # fmt: skip

timeout_option = click.option(
    "--timeout", default=1800, show_default=True, type=click.IntRange(1, 10**6), metavar="SECONDS",
    help="Under torchrun: how long to wait for a process while none finishes anything.",
)  # fmt: skip

device_map_option = click.option(
    "--device-map", type=click.Choice(["auto", "balanced", "balanced_low_0", "sequential"]),
    help="Spread a large target over all devices, as transformers does; instead of --device.",
)  # fmt: skip


def target_options(command: Command) -> Command:
    """Add --target, --heads, --device, --device-map and --dtype."""
    for option in reversed(
        [
            target_option,
            click.option(
                "--heads", "heads_name", metavar="PATH_OR_ID", help="Medusa heads of the target.  [default: the demo target's]"
            ),
            device_option,
            device_map_option,
            dtype_option,
        ]
    ):  # fmt: skip
        command = option(command)
    return command


seed_option = click.option(
    "--seed", type=click.IntRange(0, MAX_SEED), default=0, show_default=True, help="Seed of the bootstrap intervals."
)


attention_option = click.option(
    "--attention", type=click.Choice(["auto", "triton", "flex", "sdpa", "eager", "native"]), default="auto", show_default=True,
    help="Attention backend to try first; those behind it follow where it cannot serve.",
)  # fmt: skip


def require_torch(command: str) -> None:
    """Raise MissingExtraError, which names the pip command, unless the torch extra is installed."""
    for module in TORCH_SIDE:
        require_module(command, module, "torch")


def heads_path(target: str, heads: str | None) -> Path:
    """Return where the heads are: the given path, or the bundled ones of the demo target."""
    if heads is not None:
        return Path(heads)
    if target == "demo":
        return calibration_path(DEMO_HEADS)
    raise HeadsError(f"`--target {target}` needs --heads; give its Medusa heads, or train some with treeopt train")


def require_one_placement(device: str, device_map: str | None) -> None:
    """Refuse --device beside --device-map."""
    if device_map is not None and device != "auto":
        raise click.UsageError("--device and --device-map both say where the target goes; give one of them")


def load_models(
    target: str, heads: str | None, device: str, dtype: str, device_map: str | None = None
) -> tuple[LoadedTarget, MedusaHeads, str]:
    """Load target and heads; also return the heads' name for metadata."""
    require_one_placement(device, device_map)
    from treeopt.heads import MedusaHeads
    from treeopt.targets.loading import load_target

    where = heads_path(target, heads)  # first: it costs nothing and may fail
    loaded = load_target(target, device=device, dtype=dtype, device_map=device_map)
    return loaded, MedusaHeads.load(where, loaded.model, num_tokens=loaded.num_tokens), heads or "demo"


def attention_used(verifier: TreeVerifier, asked: str) -> str:
    """Say which attention backend runs, and why not the one that was asked for or would have come first."""
    on_cpu = verifier.target.device.type == "cpu"
    others = {n: r for n, r in verifier.refused.items() if asked != "auto" or not (on_cpu and n in CUDA_BACKENDS)}
    reasons = "".join(f"; not {backend}: {reason}" for backend, reason in others.items())
    return f"attention: {verifier.attention}{reasons}"


def prompts_path(given: Sequence[str]) -> list[Path]:
    """Return the given prompt files, or the bundled one."""
    return [Path(name) for name in given] or [calibration_path(DEMO_PROMPTS)]


def kind_of(path: Path) -> str:
    """Tell a trace, a table and a tree apart by what the file holds, whatever its name."""
    try:
        with path.open("rb") as file:
            if file.read(64).lstrip()[:1] not in (b"{", b"["):
                return "trace"  # safetensors begin with the length of their header
        data = strictjson.parse(path.read_bytes())
    except OSError as error:
        raise DocumentError(f"`{path}` cannot be read: {error.strerror}; give a trace, a table or a tree") from error
    except ValueError as error:
        raise DocumentError(f"`{path}` is {error}; mend it or make it again") from error
    is_tree = isinstance(data, dict) and str(data.get("schema")).startswith("treeopt.tree/")
    return "tree" if is_tree else "table"
