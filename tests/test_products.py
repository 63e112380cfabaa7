import pytest
import torch
from torch import nn

from treeopt.products import FEW, argmax, project


@pytest.mark.parametrize("rows", [1, FEW[0], FEW[-1], FEW[-1] + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_projection_is_the_modules_own(rows, dtype):
    torch.manual_seed(0)
    linear = nn.Linear(24, 50, bias=False).to(dtype)
    states = torch.randn(rows, 1, 24).to(dtype)
    with torch.no_grad():
        found, expected = project(linear, states), linear(states)
    assert found.shape == expected.shape
    assert found.is_contiguous()
    assert (found - expected).abs().max() < 1e-5
    assert project(linear, states).requires_grad  # training keeps the module's own way


def test_modules_that_are_more_than_a_weight_are_called_as_they_are():
    class Scaled(nn.Linear):
        def forward(self, states):
            return 2 * super().forward(states)

    states = torch.randn(4, 8)
    with torch.no_grad():
        hooked = nn.Linear(8, 6, bias=False)
        hooked.register_forward_hook(lambda module, inputs, output: output + 1)
        for linear in (Scaled(8, 6, bias=False), nn.Linear(8, 6), hooked):
            assert torch.equal(project(linear, states), linear(states))


@pytest.mark.parametrize("size", [5, 128, 130, 256, 1280])
def test_the_largest_value_of_each_row_is_found_the_first_of_equal_ones(size):
    torch.manual_seed(0)
    for levels in (2, 1000):
        logits = torch.randint(levels, (3, 7, size)).float()
        logits[0, 0] = float("-inf")
        assert torch.equal(argmax(logits), (logits == logits.amax(-1, keepdim=True)).int().argmax(-1))
