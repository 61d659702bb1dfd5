"""2:4 weights: converted where a GPU multiplies them, refused elsewhere."""

import pytest
import torch
from torch import nn
from torch.sparse import SparseSemiStructuredTensorCUSPARSELT, SparseSemiStructuredTensorCUTLASS
from torch.sparse import _semi_structured_conversions as torch_conversions

from shared_core.errors import CompatibilityError, ConfigError, MatchError
from shared_core.pruning import nm_mask
from shared_core.tools.sparse_inference import convert as sparse_inference
from shared_core.tools.sparse_inference.convert import to_semi_structured
from shared_core.tools.sparse_inference.layers import SemiStructuredLinear, has_two_four_kernels, two_four_obstacle


def two_four(rows, columns, dtype=torch.float16, seed=0, share=1.0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    weight = weight * nm_mask(weight, 2, 4) * (torch.rand(rows, columns, generator=generator) < share)
    return weight.to(dtype)


@pytest.mark.parametrize(("backend", "library"), [
    ("cutlass", SparseSemiStructuredTensorCUTLASS), ("cusparselt", SparseSemiStructuredTensorCUSPARSELT),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sizes_are_those_that_torch_takes(backend, library, dtype):
    rule = library._DTYPE_SHAPE_CONSTRAINTS[dtype]
    rows, columns = rule.sparse_min_rows, rule.sparse_min_cols
    assert two_four_obstacle(two_four(rows * 3, columns * 5, dtype), backend) == ""
    for shape in ((rows // 2, columns), (rows, columns // 2), (rows * 2 + 4, columns)):
        assert "in multiples of" in two_four_obstacle(two_four(*shape, dtype), backend)


def test_other_weights_are_named():
    assert "convert the model first" in two_four_obstacle(two_four(32, 64, torch.float32), "cutlass")
    weight = two_four(32, 64)
    weight[3, :4] = torch.tensor([1.0, 2.0, 0.0, 3.0])
    assert two_four_obstacle(weight, "cutlass").endswith("up to 3 of four neighbors are not zero")


# conversion


def net(dtype=torch.bfloat16):
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64), nn.Linear(64, 5)).to(dtype).eval()
    with torch.no_grad():
        model[0].weight.copy_(two_four(32, 64, dtype))
    return model


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_cpu_is_refused_and_nothing_changes():
    model = net()
    with pytest.raises(CompatibilityError, match=r"NVIDIA GPU of compute capability 8\.0 or newer, got 0 on cpu"):
        to_semi_structured(model)
    assert type(model[0]) is nn.Linear


def test_models_without_layers_are_refused():
    with pytest.raises(ConfigError, match=r"wrap it in nn\.Sequential"):
        to_semi_structured(nn.Linear(4, 4))
    with pytest.raises(MatchError, match="has no Linear"):
        to_semi_structured(nn.Sequential(nn.ReLU()))


@pytest.mark.parametrize(("capability", "able"), [((7, 5), False), ((8, 0), True), ((8, 9), True), ((9, 0), True)])
def test_kernels_need_a_capability_and_cuda(monkeypatch, capability, able):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    assert has_two_four_kernels(torch.device("cuda")) is able
    assert not has_two_four_kernels(torch.device("cpu"))
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert not has_two_four_kernels(torch.device("cuda"))


def round_trip(weight):
    """Stand in for a GPU's compression: torch's for CUTLASS, there and back."""
    packed = torch_conversions.sparse_semi_structured_from_dense_cutlass(weight)
    return torch_conversions.sparse_semi_structured_to_dense_cutlass(*packed)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(sparse_inference, "has_two_four_kernels", lambda device: True)
    monkeypatch.setattr(sparse_inference, "compressor", lambda: (round_trip, "cusparselt"))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_layers_of_the_pattern_are_converted_and_the_others_named():
    model, dense = net(), net()
    model.load_state_dict(dense.state_dict())
    first, second, last = to_semi_structured(model)
    assert (first.name, first.layout, first.density) == ("0", "2:4", 0.5)
    assert "no 2:4 pattern" in second.why
    assert "outputs in multiples of 16" in last.why
    assert [type(model[i]) for i in (0, 2, 3)] == [SemiStructuredLinear, nn.Linear, nn.Linear]
    x = torch.randn(7, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(model(x), dense(x))
    saved = model.state_dict()
    assert list(saved) == list(dense.state_dict())
    assert all(torch.equal(saved[name], tensor) for name, tensor in dense.state_dict().items())
    assert type(saved["0.weight"]) is torch.Tensor
    other = two_four(32, 64, torch.bfloat16, seed=9)
    model.load_state_dict({**saved, "0.weight": other})
    assert torch.equal(model[0].dense_weight(), other)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("wrong", ["refuses", "miscalculates", "is_nan"])
def test_a_product_that_fails_leaves_the_layer_dense(monkeypatch, wrong):
    def compress(weight):
        if wrong == "refuses":
            raise RuntimeError("CUDA error: not supported\nand more")
        return weight.flip(0) if wrong == "miscalculates" else weight * torch.nan

    monkeypatch.setattr(sparse_inference, "compressor", lambda: (compress, "cusparselt"))
    model = net()
    first = to_semi_structured(model, include=["first"])[0]
    assert first.layout == "dense"
    expected = "refused it: CUDA error: not supported" if wrong == "refuses" else "differs from the dense one"
    assert expected in first.why
    assert "more" not in first.why
    assert type(model[0]) is nn.Linear


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_on_a_gpu_outputs_and_checkpoints_are_those_of_the_dense_model(dtype):
    dense = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 128, bias=False)).to(dtype).eval()
    with torch.no_grad():
        dense[0].weight.copy_(two_four(512, 256, dtype))
        dense[2].weight.copy_(two_four(128, 512, dtype, seed=1))
    dense = dense.cuda()
    state = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
    x = torch.randn(3, 17, 256, device="cuda", dtype=dtype)
    with torch.no_grad():
        expected = dense(x)
        assert [choice.layout for choice in to_semi_structured(dense)] == ["2:4", "2:4"]
        torch.testing.assert_close(dense(x).float(), expected.float(), rtol=2e-2, atol=2e-2)
    for name, tensor in dense.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    dense.load_state_dict(state)
