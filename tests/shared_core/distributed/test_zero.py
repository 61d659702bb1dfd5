"""What DeepSpeed's engine holds, seen by the model's parameters: an engine of two processes, made here by hand."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shared_core.distributed.zero import ZeroOptimizer
from shared_core.errors import CompatibilityError
from shared_core.pruning.masks import clear_moments_


class Engine:
    """Stage 1 of one of two processes: of ``first`` all, of ``second`` elements 1 to 2, of ``third`` nothing."""

    def __init__(self, dtype=torch.float32, **attributes):
        self.first, self.second, self.third = (nn.Parameter(torch.ones(*s, dtype=dtype)) for s in ((2, 2), (3,), (2,)))
        self.flat = torch.ones(6)
        self.base = torch.optim.AdamW([nn.Parameter(self.flat)], lr=0.5, weight_decay=0.25)
        (parameter,) = self.base.param_groups[0]["params"]
        self.base.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": torch.arange(6.0) + 1}
        self.first._hp_mapping = self.part(0, 0, 4)
        self.second._hp_mapping = self.part(1, 4, 2)
        self.third._hp_mapping = None
        self.optimizer = SimpleNamespace(
            optimizer=self.base, bit16_groups=[[self.first, self.second, self.third]], cpu_offload=False, dtype=dtype,
            gradient_accumulation_dtype=dtype, single_partition_of_fp32_groups=[parameter],
        )  # fmt: skip
        vars(self.optimizer).update(attributes)

    def part(self, of_whole, of_flat, numel):
        return SimpleNamespace(
            lp_fragment_address=SimpleNamespace(start=of_whole, numel=numel),
            hp_fragment_address=SimpleNamespace(start=of_flat, numel=numel),
            hp_fragment=self.flat.narrow(0, of_flat, numel),
            param_group_index=0,
        )

    def zero_optimization_stage(self):
        return 1


def test_parts_follow_what_is_written_into_parameters():
    engine = Engine()
    with torch.no_grad():
        engine.first[0, 1], engine.second[0], engine.second[2], engine.third[0] = 0.0, 7.0, 5.0, 9.0
    ZeroOptimizer.of(engine).follow()
    assert engine.flat.tolist() == [1.0, 0.0, 1.0, 1.0, 1.0, 5.0]  # second[0] and third are the other process's


def test_what_nobody_wrote_into_keeps_the_bits_that_bf16_does_not_show():
    engine = Engine(torch.bfloat16)
    engine.flat.add_(1e-4)  # 1.0001 is 1.0 in bf16
    before = engine.flat.clone()
    with torch.no_grad():
        engine.first[1, 0] = 0.0
    ZeroOptimizer.of(engine).follow()
    assert engine.flat[2] == 0
    assert torch.equal(engine.flat[[0, 1, 3, 4, 5]], before[[0, 1, 3, 4, 5]])


def test_moments_of_masked_weights_are_cleared_in_the_part_that_is_here():
    engine = Engine()
    optimizer = ZeroOptimizer.of(engine)
    masks = {"first": torch.tensor([[True, False], [True, True]]), "second": torch.tensor([False, True, False])}
    clear_moments_([optimizer], {"first": engine.first, "second": engine.second}, masks)
    clear_moments_([optimizer], {"third": engine.third}, {"third": torch.zeros(2, dtype=torch.bool)})
    state = engine.base.state[engine.optimizer.single_partition_of_fp32_groups[0]]
    assert state["exp_avg"].tolist() == [1.0, 0.0, 3.0, 4.0, 5.0, 0.0]
    assert state["step"] == 1


def test_groups_hold_the_parameters_of_the_model_and_the_rates_of_now():
    engine = Engine()
    optimizer = ZeroOptimizer.of(engine)
    engine.base.param_groups[0]["lr"] = 0.125
    (group,) = optimizer.param_groups
    assert [id(p) for p in group["params"]] == [id(p) for p in (engine.first, engine.second, engine.third)]
    assert (group["lr"], group["weight_decay"]) == (0.125, 0.25)


def test_engines_that_keep_weights_otherwise():
    plain = SimpleNamespace(optimizer=torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    assert ZeroOptimizer.of(plain) is None
    other = SimpleNamespace(optimizer=SimpleNamespace(optimizer=None), zero_optimization_stage=lambda: 1)
    with pytest.raises(CompatibilityError, match=r"ZeRO stage 1 or 2, got SimpleNamespace"):
        ZeroOptimizer.of(other)
    with pytest.raises(CompatibilityError, match=r"weights' dtype torch.bfloat16, got torch.float32"):
        ZeroOptimizer.of(Engine(torch.bfloat16, gradient_accumulation_dtype=torch.float32))
