"""Whole parts of a training step that `make bench-gpu` measures: an FP8 layer, distillation at a language model's
vocabulary, and what masks, a loss scaler and telemetry add to a model of a billion parameters."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from operations import At, Call, Case
from speed.checkpointing import Block
from speed.distillation import ALPHA, TEMPERATURE, textbook
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerGroup, quantize_
from torchao.quantization.qat import QATConfig

from shared_core import Recipe, Session
from shared_core.distillation.chunked_loss import chunked_kd_loss
from shared_core.fp8 import Fp8Config, Fp8Linear
from shared_core.fp8.layers import convert_layer
from shared_core.fp8.native import why_not_native
from shared_core.fp8.scaling import NonFiniteWatch


def fp8_linear(at: At, recipe: str) -> Case:
    tokens, width = at.size(16384, 256, 32), at.size(4096, 256, 128)
    x, weight = at.randn(tokens, width), at.randn(width, width) / width**0.5
    grad = torch.randn_like(x)

    def layer() -> nn.Linear:
        made = nn.Linear(width, width, bias=False, device=at.device, dtype=torch.bfloat16)
        made.weight = nn.Parameter(weight.clone())
        return made

    def step(model: nn.Module) -> Call:
        (parameter,) = model.parameters()
        leaf = x.clone().requires_grad_()

        def call() -> tuple[Tensor, ...]:
            y = model(leaf)
            return (y, *torch.autograd.grad(y, (leaf, parameter), grad))

        return call

    mine, plain = layer(), layer()
    config = Fp8Config(recipe=recipe)  # type: ignore[arg-type]
    # as in a session, which has what is not finite watched, and a weight that is another in every step
    watch = NonFiniteWatch()
    watch.move_(at.device)
    watch.observing = True
    convert_layer(mine, config, index=0, watch=watch)
    in_fp8 = cast(Fp8Linear, mine).fp8
    in_fp8.keep_codes_of(mine.weight)
    mine.register_forward_pre_hook(lambda *_: in_fp8.forget_codes())
    reason = why_not_native(recipe, config.gradient_dtype, at.device)
    how = f", emulated: {reason}" if reason else ""
    peers: dict[str, Any] = {"bf16": plain, **at.compiled("bf16 compiled", layer())}
    if recipe in ("tensorwise", "rowwise"):
        torchao = convert_to_float8_training(nn.Sequential(layer()), config=Float8LinearConfig.from_recipe_name(recipe))
        peers |= {"torchao": torchao, **at.compiled("torchao compiled", torchao)}
    return Case(
        f"FP8 linear layer, {recipe}, {tokens} x {width} x {width}, forward and backward{how}",
        step(mine),
        {name: step(peer) for name, peer in peers.items()},
        flops=6 * tokens * width * width,
        tolerance=0.15,  # e5m2 gradients keep two bits of mantissa
    )


def distillation(at: At) -> Case:
    tokens, classes = at.size(8192, 256, 16), at.size(128_256, 8000, 64)
    width, teacher_width = at.size(2048, 128, 16), at.size(4096, 256, 32)
    hidden, teacher_hidden = at.randn(tokens, width), at.randn(tokens, teacher_width)
    weight, teacher = at.randn(classes, width) / width**0.5, at.randn(classes, teacher_width) / teacher_width**0.5
    labels = torch.randint(classes, (tokens,), device=at.device)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]

    def stepped(loss: Callable[[], Tensor]) -> Call:
        def call() -> tuple[Tensor, ...]:
            value = loss()
            return (value, *torch.autograd.grad(value, leaves))

        return call

    def ours() -> Tensor:
        options = {"temperature": TEMPERATURE, "labels": labels, "alpha": ALPHA}
        return chunked_kd_loss(hidden, weight, teacher_hidden, teacher, **options)

    def naive() -> Tensor:
        logits, targets = (hidden @ weight.t()).float(), (teacher_hidden @ teacher.t()).float()
        return ALPHA * F.cross_entropy(logits, labels) + (1 - ALPHA) * textbook(logits, targets)

    @torch.no_grad()
    def products() -> tuple[Tensor, ...]:
        rows = at.size(1024, 64, 8)
        summed = torch.zeros_like(weight)
        for start in range(0, tokens, rows):
            part = slice(start, start + rows)
            logits = hidden[part] @ weight.t()
            teacher_hidden[part] @ teacher.t()
            logits @ weight
            summed.addmm_(logits.t(), hidden[part])
        return (summed,)

    peers = {"textbook": stepped(naive), "the products alone": products}
    peers |= {name: stepped(call) for name, call in at.compiled("textbook compiled", naive).items()}
    if importlib.util.find_spec("liger_kernel") and at.device.type == "cuda":
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

        jsd = LigerFusedLinearJSDLoss(ALPHA, 1 - ALPHA, temperature=TEMPERATURE)
        peers["Liger's chunked JSD"] = stepped(lambda: jsd(hidden, weight, teacher_hidden, teacher, labels, None, None))
    return Case(
        f"distillation from hidden states, {tokens} tokens, {classes} classes, {width} features, teacher's "
        f"{teacher_width}, bfloat16",
        stepped(ours),
        peers,
        flops=2 * tokens * classes * (3 * width + teacher_width),
        unlike=("the products alone", "Liger's chunked JSD"),  # no loss; another divergence
    )


RECIPES: dict[str, dict[str, Any]] = {
    "masks": {"prune": {"sparsity": 0.5, "schedule": "one_shot", "begin": 0}},
    "loss scaler": {"loss_scale": {"kind": "dynamic", "telemetry_every": 0}},
    "loss scaler and telemetry every step": {"loss_scale": {"kind": "dynamic", "telemetry_every": 1}},
}


def _stock(model: nn.Module) -> None: ...


def _started(
    at: At,
    width: int,
    layers: int,
    options: dict[str, Any],
    change: Callable[[nn.Module], object] = _stock,
) -> tuple[nn.Sequential, torch.optim.Optimizer, Session]:
    torch.manual_seed(0)
    with torch.device(at.device):
        model = nn.Sequential(*(Block(width, heads=width // at.size(128, 16, 16)) for _ in range(layers)))
    change(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    session = Session(Recipe.from_dict(options))
    session.attach(model)
    session.begin([optimizer], total_steps=1_000_000)
    return model, optimizer, session


def training_step(at: At, recipe: str) -> Case:
    """Return a step in fp16 of 1.2 B parameters with one recipe, beside the same with torch's GradScaler alone."""
    width, layers = at.size(2048, 128, 32), at.size(24, 2, 2)
    batch, length = at.size(4, 2, 1), at.size(2048, 64, 8)
    x = torch.randn(batch, length, width, device=at.device)
    dtype = torch.float16 if at.device.type == "cuda" else torch.bfloat16

    def step_of(options: dict[str, Any]) -> Call:
        model, optimizer, session = _started(at, width, layers, options)
        scaling: Any = session.techniques.get("loss_scale")
        scaler = scaling.make_scaler(at.device.type) if scaling else torch.amp.GradScaler(at.device.type)

        def step() -> Tensor:
            optimizer.zero_grad()
            with torch.autocast(at.device.type, dtype):
                loss = model(x).float().square().mean()
            scaler.scale(session.loss(loss)).backward()
            scaler.unscale_(optimizer)
            session.before_step()
            scaler.step(optimizer)
            scaler.update()
            session.after_step()
            return loss

        return step

    parameters = 12 * layers * width**2
    return Case(
        f"training step with {recipe}, {parameters / 1e9:.2f} B parameters, {batch * length} tokens, {dtype}".replace(
            "torch.", ""
        ),
        step_of(RECIPES[recipe]),
        {"GradScaler alone": step_of({})},
        flops=6 * parameters * batch * length,
        tolerance=1e-3,
        unlike=("GradScaler alone",) if "prune" in RECIPES[recipe] else (),
    )


def _by_torchao_float8(model: nn.Module, recipe: str) -> None:
    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))


def _by_torchao_qat(model: nn.Module) -> None:
    quantize_(model, QATConfig(Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32)), step="prepare"))


NARROW: dict[str, tuple[dict[str, Any], Callable[[nn.Module], object]]] = {
    **{
        f"FP8 {recipe}": (
            {"fp8": {"recipe": recipe, "include": ("*", "first", "last")}},
            partial(_by_torchao_float8, recipe=recipe),
        )
        for recipe in ("tensorwise", "rowwise")
    },
    "QAT of int8 activations and int4 weights": ({"qat": {"scheme": "int8_dynamic_int4_weight"}}, _by_torchao_qat),
}
"""Recipes whose products are narrow, and what makes the same of a model by torchao."""


def narrow_step(at: At, recipe: str) -> Case:
    """Return a step in bfloat16 autocast of .4 B parameters with one recipe, beside torchao's and none, compiled too.

    Blocks are compiled one by one, as all trainers of large models do.
    """
    width, layers = at.size(4096, 256, 64), at.size(2, 2, 2)
    batch, length = at.size(4, 2, 1), at.size(2048, 64, 32)
    x = torch.randn(batch, length, width, device=at.device)
    options, by_torchao = NARROW[recipe]

    def step_of(options: dict[str, Any], change: Callable[[nn.Module], object], compiled: bool) -> Call:
        model, optimizer, session = _started(at, width, layers, options, change)
        for block in model if compiled else ():
            block.compile(backend=at.compiler)

        def step() -> Tensor:
            optimizer.zero_grad()
            with torch.autocast(at.device.type, torch.bfloat16):
                loss = model(x).float().square().mean()
            session.loss(loss).backward()
            session.before_step()
            optimizer.step()
            session.after_step()
            return loss.detach()

        return step

    peers = {"bf16": step_of({}, _stock, False), "torchao": step_of({}, by_torchao, False)}
    if at.compiler:
        peers |= {
            "bf16 compiled": step_of({}, _stock, True),
            "torchao compiled": step_of({}, by_torchao, True),
            "ours compiled": step_of(options, _stock, True),
        }
    parameters = 12 * layers * width**2
    return Case(
        f"training step with {recipe}, {parameters / 1e9:.2f} B parameters, {batch * length} tokens, bfloat16",
        step_of(options, _stock, False),
        peers,
        flops=6 * parameters * batch * length,
        unlike=tuple(peers),  # each trains a model of its own
    )


TRAINING: tuple[Callable[[At], Case], ...] = (
    *(partial(fp8_linear, recipe=recipe) for recipe in ("tensorwise", "rowwise", "blockwise")),
    distillation,
    *(partial(training_step, recipe=recipe) for recipe in RECIPES),
    *(partial(narrow_step, recipe=recipe) for recipe in NARROW),
)
