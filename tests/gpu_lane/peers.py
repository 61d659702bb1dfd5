"""The peers' training steps on the pretended device, in the same loop as ours: what each launches a step."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from pretended_device import CUDA, PretendedDevice, entered, on_pretended_device
from small_encoder import VOCABULARY, Block, Encoder
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn
from torch.utils import checkpoint

from shared_core.lora.config import LoraConfig as OurConfig
from shared_core.lora.quantized_base import freeze

STEPS, ACCUMULATE = 4, 2
TOKENS, ROWS = 8, 4


class Ddp(nn.parallel.DistributedDataParallel):
    """DDP of which the hook alone runs: its reducer wants a clock of the device."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module, self._comm_hooks = module, []

    def forward(self, ids: Tensor) -> Tensor:
        return self.module(ids)

    def _register_builtin_comm_hook(self, *_: Any) -> None: ...

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        self.hook = state, hook

    def reduce(self) -> None:
        state, hook = self.hook
        parameters = [value for value in self.module.parameters() if value.grad is not None]
        buffer = torch.cat([value.grad.flatten() for value in parameters])
        gradients = [
            part.view_as(value)
            for part, value in zip(buffer.split([value.numel() for value in parameters]), parameters, strict=True)
        ]
        bucket = SimpleNamespace(
            buffer=lambda: buffer, parameters=lambda: parameters, gradients=lambda: gradients, index=lambda: 0,
            is_last=lambda: True,
        )  # fmt: skip
        reduced = hook(state, bucket).wait()
        assert reduced.device == CUDA
        assert reduced.shape == buffer.shape


def two_processes() -> None:
    """Be one of two processes, the other of which is pretended."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())


class Loop:
    """A plain training loop; a peer changes its parts."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = Encoder().to(CUDA)
        self.dtype, self.clips = dtype, True
        self.scaler = torch.amp.GradScaler("cuda", enabled=False)
        self.make_optimizer: Callable[[Any], Any] = lambda values: torch.optim.AdamW(values, 1e-3, fused=True)
        self.around: Callable[[], Any] = contextlib.nullcontext
        self.loss: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda ids, logits, loss: loss
        self.reduced: Callable[[], None] = lambda: None
        self.stepped: Callable[[], None] = lambda: None

    def linears(self) -> list[nn.Linear]:
        return [module for module in self.model.modules() if isinstance(module, nn.Linear)]

    def ready(self) -> None:
        self.optimizer = self.make_optimizer([value for value in self.model.parameters() if value.requires_grad])

    def step(self) -> None:
        self.optimizer.zero_grad()
        for left in reversed(range(ACCUMULATE)):
            ids, labels = (torch.randint(VOCABULARY, (ROWS, TOKENS)).to(CUDA) for _ in range(2))
            with self.around(), torch.autocast("cuda", self.dtype, enabled=self.dtype is not None):
                logits = self.model(ids)
                rows = F.cross_entropy(logits.float().transpose(1, 2), labels, reduction="none").mean(1)
                loss = self.loss(ids, logits, rows.mean()) / ACCUMULATE
            self.scaler.scale(loss).backward()
            if left and hasattr(self.optimizer, "signal_skip_step"):  # Opacus sums after each micro-batch
                self.optimizer.signal_skip_step(do_skip=True)
                self.optimizer.step()
                self.optimizer.zero_grad()
        self.reduced()
        self.scaler.unscale_(self.optimizer)
        if self.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.stepped()


def counted_as_one(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
    """Stand in for `torch.compile`: what it makes of a function launches one kernel, if all goes well."""

    def one(*args: Any, **kwargs: Any) -> Any:
        before = entered().launches.copy()
        result = function(*args, **kwargs)
        entered().launches = before + collections.Counter({"compiled": 1})
        return result

    return one


def with_hook(loop: Loop, hook: Any, state: Any = None) -> None:
    two_processes()
    model = Ddp(loop.model)
    model.register_comm_hook(None if state is None else state(), hook)
    loop.reduced, loop.model = model.reduce, model


def lora(loop: Loop, base: str = "none") -> None:
    from peft import LoraConfig, get_peft_model

    names = ["qkv", "out", "up", "down"]
    if base != "none":
        for module in [module for module in loop.model.modules() if isinstance(module, Block)]:
            for name in names:
                setattr(module, name, freeze(getattr(module, name), OurConfig(base=base, rank=4)))
    loop.model = get_peft_model(loop.model, LoraConfig(r=4, target_modules=names)).base_model.model


def stochastic_rounding(loop: Loop) -> None:
    from torchao.optim import _AdamW

    torch.compile = counted_as_one  # type: ignore[assignment]
    loop.model = loop.model.bfloat16()
    loop.make_optimizer = lambda values: _AdamW(values, 1e-3, bf16_stochastic_round=True)


def mask_once(loop: Loop) -> None:
    for layer in loop.linears():
        prune.l1_unstructured(layer, "weight", 0.5)


def mask_neurons(loop: Loop) -> None:
    for layer in loop.linears():
        prune.ln_structured(layer, "weight", 0.5, 2, 0)


def mask_each_step(loop: Loop) -> None:
    """Prune a further share in each step, in the way that torch's pages do."""

    def stepped() -> None:
        layers = [(layer, "weight") for layer in loop.linears()]
        prune.global_unstructured(layers, prune.L1Unstructured, amount=0.1)

    mask_once(loop)
    loop.stepped = stepped


def sparsifier(loop: Loop, each: bool, **options: Any) -> None:
    from torchao.prototype.sparsity.sparsifier.weight_norm_sparsifier import WeightNormSparsifier

    chosen = WeightNormSparsifier(**options)
    names = {id(module): name for name, module in loop.model.named_modules()}
    chosen.prepare(loop.model, [{"tensor_fqn": f"{names[id(layer)]}.weight"} for layer in loop.linears()])
    chosen.step()
    if each:
        loop.stepped = chosen.step


def two_of_four(loop: Loop) -> None:
    sparsifier(loop, True, sparsity_level=1.0, sparse_block_shape=(1, 4), zeros_per_block=2)


def blocks(loop: Loop) -> None:
    sparsifier(loop, False, sparsity_level=0.5, sparse_block_shape=(4, 4), zeros_per_block=16)


def torch_ao(loop: Loop, config: Any = None) -> None:
    loop.model.train()
    loop.model.qconfig = config or torch.ao.quantization.get_default_qat_qconfig("x86")  # type: ignore[assignment]
    for module in loop.model.modules():
        if isinstance(module, nn.LayerNorm | nn.Embedding):
            module.qconfig = None  # type: ignore[assignment]
    loop.model = torch.ao.quantization.prepare_qat(loop.model.cpu())
    loop.model(torch.zeros(1, TOKENS, dtype=torch.long))  # its ranges get their shapes
    loop.model = loop.model.to(CUDA)


def qat(loop: Loop, weight: Any, activation: Any = None) -> None:
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    quantize_(loop.model, QATConfig(activation_config=activation, weight_config=weight, step="prepare"))


def contiguous_gradients(loop: Loop) -> None:
    """Give the last layer the rows that it asks for: those of the loss lie otherwise."""

    loop.model.head.register_forward_hook(lambda *args: _Contiguous.apply(args[2]))


class _Contiguous(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


def int8_dynamic(loop: Loop) -> None:
    from torchao.quantization.qat import IntxFakeQuantizeConfig as Config

    qat(loop, Config(torch.int8, "per_channel"), Config(torch.int8, "per_token", is_symmetric=False))


def int4_weight(loop: Loop) -> None:
    from torchao.quantization.qat import IntxFakeQuantizeConfig as Config

    qat(loop, Config(torch.int4, group_size=32))


def fp8_fake(loop: Loop) -> None:
    from torchao.quantization import PerRow
    from torchao.quantization.qat import Float8FakeQuantizeConfig as Config

    qat(loop, Config(torch.float8_e4m3fn, PerRow()), Config(torch.float8_e4m3fn, PerRow()))


def mxfp4_fake(loop: Loop) -> None:
    from torchao.prototype.qat import MXFakeQuantizeConfig as Config
    from torchao.quantization.quantize_.common import KernelPreference

    config = Config(torch.float4_e2m1fn_x2, 32, kernel_preference=KernelPreference.EMULATED)
    qat(loop, config, config)
    contiguous_gradients(loop)


def nvfp4_fake(loop: Loop) -> None:
    from torchao.prototype.qat import NVFP4FakeQuantizeConfig as Config

    qat(loop, Config(True), Config(True))


def learned_ranges(loop: Loop) -> None:
    from torch.ao.quantization._learnable_fake_quantize import _LearnableFakeQuantize as Learned
    from torch.ao.quantization.observer import MovingAverageMinMaxObserver as Observer

    options = {"observer": Observer, "scale": 0.1, "zero_point": 0.0, "use_grad_scaling": True}
    codes = ((0, 255, torch.quint8), (-128, 127, torch.qint8))
    made = [Learned.with_args(quant_min=low, quant_max=high, dtype=dtype, **options) for low, high, dtype in codes]
    torch_ao(loop, torch.ao.quantization.QConfig(*made))
    for module in loop.model.modules():
        if isinstance(module, Learned):
            module.enable_param_learning()


def fp8(loop: Loop, recipe: str) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(loop.model, config=Float8LinearConfig.from_recipe_name(recipe))


class MxLinear(nn.Linear):
    """torchao's product of MX operands in a layer."""

    def forward(self, x: Tensor) -> Tensor:
        from torchao.prototype.moe_training.mxfp8_linear import mx_mm
        from torchao.prototype.mx_formats.config import (
            MXFP8Dim0CastKernelChoice,
            MXFP8Dim1CastKernelChoice,
            ScaleCalculationMode,
        )
        from torchao.quantization.quantize_.common import KernelPreference

        kind = torch.float8_e4m3fn
        y = mx_mm.apply(
            x, self.weight, kind, kind, kind, 32, KernelPreference.EMULATED, MXFP8Dim0CastKernelChoice.TORCH,
            MXFP8Dim1CastKernelChoice.TORCH, ScaleCalculationMode.FLOOR, False,
        )  # fmt: skip
        return y if self.bias is None else y + self.bias


def mx(loop: Loop) -> None:
    for layer in loop.linears():
        if layer.out_features % 32 == 0:
            layer.__class__ = MxLinear


def checkpoint_blocks(loop: Loop, context: Any = checkpoint.noop_context_fn) -> None:
    for block in [module for module in loop.model.modules() if isinstance(module, Block)]:
        inner = block.forward
        block.forward = lambda x, inner=inner: checkpoint.checkpoint(  # type: ignore[method-assign]
            inner, x, use_reentrant=False, context_fn=context
        )


def checkpoint_selective(loop: Loop) -> None:
    kept = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    checkpoint_blocks(loop, lambda: checkpoint.create_selective_checkpoint_contexts(kept))


def offload(loop: Loop) -> None:
    loop.around = lambda: torch.autograd.graph.save_on_cpu(pin_memory=True)


def divergence(loop: Loop) -> None:
    from trl.experimental.gkd import GKDTrainer

    teacher = Encoder().to(CUDA).eval()

    def loss(ids: Tensor, logits: Tensor, hard: Tensor) -> Tensor:
        with torch.no_grad():
            theirs = teacher(ids)
        soft = GKDTrainer.generalized_jsd_loss(logits, theirs, beta=0.0, temperature=2.0)
        return 0.5 * hard + 0.5 * soft

    loop.loss = loss


def grad_scaler(loop: Loop) -> None:
    loop.scaler = torch.amp.GradScaler("cuda")


def opacus(loop: Loop) -> None:
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    loop.model, loop.clips = GradSampleModule(loop.model), False
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": ROWS * ACCUMULATE}
    inner = loop.make_optimizer
    loop.make_optimizer = lambda values: DPOptimizer(inner(values), **options)


def _power() -> Any:
    return powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)


def average(loop: Loop, how: Any) -> None:
    averaged = AveragedModel(loop.model, multi_avg_fn=how())
    loop.stepped = lambda: averaged.update_parameters(loop.model)


_fp8_tensorwise, _fp8_rowwise = (functools.partial(fp8, recipe=recipe) for recipe in ("tensorwise", "rowwise"))
PEERS: dict[str, tuple[str, Callable[[Loop], None]]] = {
    "lora": ("peft", lora),
    "lora nf4": ("peft", functools.partial(lora, base="nf4")),
    "lora int8": ("peft", functools.partial(lora, base="int8")),
    "primary_weights stochastic": ("torchao _AdamW", stochastic_rounding),
    "prune": ("torch.nn.utils.prune", mask_once),
    "prune cubic": ("torch.nn.utils.prune", mask_each_step),
    "prune n_m": ("torchao WeightNormSparsifier", two_of_four),
    "prune neuron": ("torch.nn.utils.prune", mask_neurons),
    "prune block": ("torchao WeightNormSparsifier", blocks),
    "lottery": ("torch.nn.utils.prune", mask_once),
    "qat": ("torch.ao", torch_ao),
    "qat int8_dynamic": ("torchao", int8_dynamic),
    "qat int4_weight": ("torchao", int4_weight),
    "qat lsq": ("torch.ao", learned_ranges),
    "qat fp8": ("torchao", fp8_fake),
    "qat mxfp4": ("torchao", mxfp4_fake),
    "qat nvfp4": ("torchao", nvfp4_fake),
    "fp8": ("torchao", _fp8_tensorwise),
    "fp8 rowwise": ("torchao", _fp8_rowwise),
    "fp8 mx": ("torchao", mx),
    "checkpointing": ("torch.utils.checkpoint", checkpoint_blocks),
    "checkpointing selective": ("torch.utils.checkpoint", checkpoint_selective),
    "activations offload": ("torch save_on_cpu", offload),
    "distill": ("TRL GKD", divergence),
    "loss_scale": ("torch GradScaler", grad_scaler),
    "loss_scale auto": ("torch GradScaler", grad_scaler),
    "dp": ("Opacus", opacus),
    "comm": ("torch hook", functools.partial(with_hook, hook=default_hooks.bf16_compress_hook)),
    "comm powersgd": ("torch hook", functools.partial(with_hook, hook=powerSGD_hook.powerSGD_hook, state=_power)),
    "average": ("torch AveragedModel", functools.partial(average, how=functools.partial(get_ema_multi_avg_fn, 0.999))),
    "average swa": ("torch AveragedModel", functools.partial(average, how=get_swa_multi_avg_fn)),
}
"""By case of ours the peer's name, and what makes a loop the peer's."""
LIBRARIES = (
    *("peft.tuners.lora.bnb", "opacus", "trl.experimental.gkd", "torchao.float8", "torchao.quantization.qat"),
    *("torchao.prototype.qat", "torchao.optim", "torchao.prototype.moe_training.mxfp8_linear"),
    "torchao.prototype.sparsity.sparsifier.weight_norm_sparsifier",
)
"""Imported before a fork, once for all."""


@on_pretended_device
def launches_of(device: PretendedDevice, name: str, dtype: torch.dtype | None) -> int:
    """Return how many operators a steady step of a case's peer launches; of a plain loop where there is none."""
    loop = Loop(dtype)
    if name in PEERS:
        PEERS[name][1](loop)
    loop.ready()
    for _ in range(STEPS):
        device.launches.clear()
        loop.step()
    return device.launches.total()
