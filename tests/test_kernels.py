import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from treeopt.attention import streamed
from treeopt.attention.streamed import Launch

if sys.platform != "linux":
    pytest.skip("Triton is made for Linux", allow_module_level=True)

import triton

TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


def run_interpreted(code):
    """Run a script with Triton's interpreter, which has to be chosen before the kernels are imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)


COMPARE = """
import torch
from treeopt import DraftTree, chain, dense_tree
from treeopt.attention import dense, streamed
from treeopt.attention.passes import Pass
from treeopt.verify.acceptance import TreeIndex

def compare(tree, heads, kv_heads, head_dim, dtype, starts, slots_a_split, tolerance):
    streamed.SLOTS_A_SPLIT = slots_a_split
    index, starts = TreeIndex.of(tree, torch.device("cpu")), torch.tensor(starts)
    span = int(starts.max()) + tree.num_nodes
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(len(starts), tree.num_nodes, heads, head_dim, generator=generator).transpose(1, 2).to(dtype)
    key, value = torch.randn(2, len(starts), kv_heads, span + 5, head_dim, generator=generator).to(dtype)
    key[:, :, span:], value[:, :, span:] = float("nan"), float("nan")  # what lies behind the span is nobody's
    at = Pass(starts, index.depths, index.mask, span, words=index.words)
    one = streamed.attend(query, key[:, :, :span], value[:, :, :span], at, scaling=0.3, window=None)
    other = dense.attend_eagerly(
        query.double(), key[:, :, :span].double(), value[:, :, :span].double(), at, scaling=0.3, window=None
    )
    assert one.shape == other.shape == (len(starts), tree.num_nodes, heads, head_dim)
    difference = (one.double() - other).abs().max().item()
    assert difference < tolerance, (tree, heads, kv_heads, head_dim, dtype, difference)
"""


def test_kernels_in_the_interpreter_equal_eager_attention():
    found = run_interpreted(
        COMPARE
        + """
wide = DraftTree.from_paths([(i,) for i in range(66)] + [(65, 0), (64, 1)])  # its masks take two words
compare(chain(0), 4, 2, 16, torch.float32, [40, 0, 7], 16, 1e-5)
compare(dense_tree([3, 2, 2]), 4, 1, 16, torch.float32, [0, 70, 129], 1024, 1e-5)
compare(dense_tree([3, 2, 2]), 2, 2, 64, torch.float32, [129], 40, 1e-5)
compare(dense_tree([2, 2]), 6, 2, 80, torch.float16, [33, 64], 32, 4e-3)
compare(chain(4), 2, 1, 256, torch.float16, [20], 16, 4e-3)
compare(wide, 2, 1, 16, torch.float32, [5], 16, 1e-5)
print("equal")
"""
    )
    assert found.stdout == "equal\n", found.stderr


def test_a_wrong_mask_is_seen_by_the_comparison():
    found = run_interpreted(
        COMPARE
        + """
right = streamed.attend
def wrong(query, key, value, at, **keywords):
    full = torch.ones_like(at.visible)
    return right(query, key, value, Pass(at.starts, at.depths, full, at.span), **keywords)
streamed.attend = wrong
compare(dense_tree([2, 2]), 2, 1, 16, torch.float32, [5], 16, 1e-5)
"""
    )
    assert "AssertionError" in found.stderr


def test_a_target_decodes_through_the_kernels_in_the_interpreter():
    found = run_interpreted(
        """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from treeopt import dense_tree
from treeopt.heads import MedusaHeads
from treeopt.verify import TreeVerifier
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=13, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    head_dim=16, max_position_embeddings=64, eos_token_id=None, bos_token_id=None,
)
target = LlamaForCausalLM(config).eval()
with torch.no_grad():
    for parameter in target.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 0.3)
heads = MedusaHeads.for_target(target, 2)
decoded = {}
for attention in ("triton", "eager"):
    verifier = TreeVerifier(target, heads, dense_tree([3, 2]), attention=attention)
    assert verifier.attention == attention
    decoded[attention] = [row.tokens for row in verifier.decode([[3, 1, 4], [1, 5, 9, 2, 6]], 8)]
assert decoded["triton"] == decoded["eager"], decoded
print("equal")
"""
    )
    assert found.stdout == "equal\n", found.stderr


# Ahead of time, without a GPU


def launches(dtype):
    largest = streamed.PRECISE_HEAD_DIM if dtype == torch.float32 else streamed.HEAD_DIMS[1]
    for head_dim in (64, 128, 256):
        if head_dim <= largest:
            yield from (
                (head_dim, launch)
                for launch in dict.fromkeys(Launch.of(packed, head_dim, 8192, dtype) for packed in (7, 256))
            )


def compiled(kernel, constants, dtype, capability, launch):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature, aligned = {}, {}
    for place, name in enumerate(names):
        signature[name] = kind(name, dtype) if name not in constants else "constexpr"
        # Strides of tensors are multiples of 16, as Triton finds at a launch.
        if name.endswith("_ptr") or name.split("_")[0] in ("query", "key", "value"):
            aligned[place,] = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=aligned,
    )
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def kind(name, dtype):
    if name in ("total_ptr", "maximum_ptr", "weight_ptr"):
        return "*fp32"
    if name in ("words_ptr", "starts_ptr"):
        return "*i64"
    if name.endswith("_ptr"):
        return TYPES[dtype]
    return "fp32" if name == "scale" else "i32"


def stack_bytes(binary, tmp_path):
    """Return the bytes of stack a kernel uses: registers that were spilled."""
    file = tmp_path / "kernel.cubin"
    file.write_bytes(binary.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    printed = subprocess.run([tool, "--dump-resource-usage", file], capture_output=True, text=True, check=True).stdout
    return max(int(size) for size in re.findall(r"STACK:(\d+)", printed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_every_launch_compiles_without_spilling(tmp_path, dtype, capability):
    from treeopt.attention.kernels import merge_splits, tree_attention

    for head_dim, launch in launches(dtype):
        sizes = {"groups": 4, "head_dim": head_dim, "padded_dim": 1 << (head_dim - 1).bit_length()}
        blocks = {"block_rows": launch.block_rows, "block_slots": launch.block_slots, "num_splits": launch.num_splits}
        attention = compiled(tree_attention, {**sizes, **blocks, "precise": launch.precise}, dtype, capability, launch)
        assert stack_bytes(attention, tmp_path) == 0, (head_dim, launch)
        parts = {**sizes, "num_parts": launch.num_splits + 1}
        assert stack_bytes(compiled(merge_splits, parts, dtype, capability, launch), tmp_path) == 0


def test_a_block_too_large_for_the_registers_is_seen_to_spill(tmp_path):
    from treeopt.attention.kernels import tree_attention

    launch = Launch(block_rows=32, block_slots=32, num_splits=8, num_warps=4, num_stages=2, precise=True)
    sizes = {"groups": 4, "head_dim": 128, "padded_dim": 128, "precise": True}
    blocks = {"block_rows": 32, "block_slots": 32, "num_splits": 8}
    binary = compiled(tree_attention, {**sizes, **blocks}, torch.float32, 80, launch)
    assert stack_bytes(binary, tmp_path) > 0
