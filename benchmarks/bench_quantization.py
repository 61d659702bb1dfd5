"""What quantization-aware training adds to a step of a small transformer, and how fast int8 inference then is."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from measure import Row, interleaved, main, milliseconds, ratio
from torch import Tensor, nn
from torchao.quantization import quantize_
from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

from shared_core import Recipe, Session
from shared_core.quantization import conversion_report, convert, quantize

HEADS = 6


class Block(nn.Module):
    """A transformer block made of linear layers that every library can find."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*qkv).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def transformer(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(width) for _ in range(5)])


def by_torchao(width: int) -> nn.Module:
    model = transformer(width)
    activations = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    weights = IntxFakeQuantizeConfig(torch.int8, "per_channel")
    quantize_(model, QATConfig(activation_config=activations, weight_config=weights, step="prepare"))
    return model


def by_torch_ao(width: int) -> nn.Module:
    model = transformer(width).train()
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.qconfig = None  # type: ignore[assignment]
    return torch.ao.quantization.prepare_qat(model)


def step_of(
    model: nn.Module, width: int, tokens: int, recipe: dict[str, Any] | None = None, compiled: bool = False
) -> Callable[[], None]:
    session = Session(Recipe.from_dict(recipe or {}))
    session.attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    session.begin([optimizer], total_steps=1_000_000)
    inputs = torch.randn(tokens // 64, 64, width)
    forward = torch.compile(model) if compiled else model  # a model of its own for each step: nothing is shared

    def step() -> None:
        optimizer.zero_grad()
        session.loss(forward(inputs).square().mean()).backward()
        session.before_optimizer_step()
        optimizer.step()
        session.after_optimizer_step()

    return step


def cost(width: int, tokens: int, rounds: int) -> Row:
    times = interleaved(
        {
            "plain": step_of(transformer(width), width, tokens),
            "torchao": step_of(by_torchao(width), width, tokens),
            "torch.ao": step_of(by_torch_ao(width), width, tokens),
            "ours": step_of(transformer(width), width, tokens, {"qat": {"scheme": "int8"}}),
        },
        rounds=rounds,
        warmup=2,
    )
    peers = ", ".join(f"{name} {ratio(times, name, 'plain').text()}" for name in ("torchao", "torch.ao"))
    return Row(
        f"int8 quantization-aware training, one step at {tokens} tokens, 8.9 M parameters "
        f"(plain: {milliseconds(times, 'plain')})",
        f"{milliseconds(times, 'ours')}; activations per tensor, EMA ranges",
        f"{peers}; torchao per token, torch.ao (fbgemm) per tensor",
        ratio(times, "ours", "plain").text(),
    )


# scheme → largest ratio to the plain step at 256 and at 2048 tokens
SCHEMES = {"int8": (1.28, 1.10), "int4_weight": (1.20, 1.04), "int8_dynamic_int4_weight": (1.33, 1.13)}


NEAR = 1.05  # largest ratio of a compiled step to the compiled plain one


def cost_of_schemes(width: int, tokens: int, rounds: int, compiled: bool = False) -> list[Row]:
    """Return a row for each scheme, beside the plain step of the same kind: both eager, or both compiled."""
    torch._dynamo.reset()
    recipes = {"plain": {}, **{scheme: {"qat": {"scheme": scheme}} for scheme in SCHEMES}}
    steps = {name: step_of(transformer(width), width, tokens, recipe, compiled) for name, recipe in recipes.items()}
    # the second step of a run has ranges for the first time and is compiled anew
    times = interleaved(steps, rounds=rounds, warmup=3 if compiled else 2)
    rows = []
    for scheme, targets in SCHEMES.items():
        target, found = NEAR if compiled else targets[tokens > 256], ratio(times, scheme, "plain")
        rows.append(
            Row(
                f"{scheme} quantization-aware training{', torch.compile' if compiled else ''}, one step at {tokens} "
                f"tokens (plain{', compiled too' if compiled else ''}: {milliseconds(times, 'plain')})",
                milliseconds(times, scheme),
                ratio=found.text(3),
                target=f"<= {target:.2f}",
                met=found.median <= target,
            )
        )
    return rows


CONVERTED = {
    "int8 weight-only": ("int8_weight", torch.float32),
    "int8 dynamic": ("int8_dynamic", torch.float32),
    "int8 dynamic on bf16": ("int8_dynamic", torch.bfloat16),
    "int8 static": ("int8", torch.float32),
}


def inference(width: int, tokens: int, rounds: int, compiled: bool) -> list[Row]:
    """Return a row for each converted model, beside the same model in fp32 and bf16."""
    inputs = torch.randn(tokens // 64, 64, width)
    plain = transformer(width).eval()
    models: dict[str, tuple[nn.Module, torch.dtype]] = {
        "fp32": (plain, torch.float32),
        "bf16": (copy.deepcopy(plain).bfloat16(), torch.bfloat16),
    }
    for name, (scheme, dtype) in CONVERTED.items():
        quantized = quantize(models["bf16" if dtype == torch.bfloat16 else "fp32"][0], scheme, [inputs.to(dtype)])
        models[name] = convert(quantized, backend="torchao"), dtype
    calls = {name: forward_of(model, inputs.to(dtype), compiled) for name, (model, dtype) in models.items()}
    exact = calls["fp32"]()
    times = interleaved(calls, rounds=rounds, warmup=3)
    rows = []
    for name in CONVERTED:
        noise = (calls[name]().float() - exact).square().mean()
        kernels = {entry["kernel"] for entry in conversion_report(models[name][0]).values()}
        against = {peer: ratio(times, name, peer) for peer in ("fp32", "bf16")}
        rows.append(
            Row(
                f"{name} inference at {tokens} tokens, 8.9 M parameters, "
                f"{'torch.compile with freezing' if compiled else 'eager'} ({'; '.join(sorted(kernels))})",
                f"{milliseconds(times, name)}; {10 * torch.log10(exact.square().mean() / noise).item():.0f} dB to fp32",
                f"fp32 {milliseconds(times, 'fp32')}, bf16 {milliseconds(times, 'bf16')}",
                f"{against['fp32'].text()} of fp32, {against['bf16'].text()} of bf16",
                target="ahead of bf16",
                met=against["bf16"].median < 1,
            )
        )
    return rows


def forward_of(model: nn.Module, inputs: Tensor, compiled: bool) -> Callable[[], Tensor]:
    # an option of this call alone: the weights become constants, packed once
    call = torch.compile(model, options={"freezing": True}) if compiled else model

    @torch.no_grad()
    def forward() -> Tensor:
        output: Tensor = call(inputs)
        return output

    return forward


def measure(quick: bool) -> list[Row]:
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    if quick:
        return [cost(96, 128, rounds=2), *inference(96, 128, rounds=2, compiled=False)]
    rows = [cost(384, 256, rounds=15), cost(384, 2048, rounds=5)]
    for compiled in (False, True):
        rows += [*cost_of_schemes(384, 256, 15, compiled), *cost_of_schemes(384, 2048, 5, compiled)]
    for tokens in (64, 512):
        for compiled in (False, True):
            rows += inference(384, tokens, rounds=15, compiled=compiled)
    return rows


if __name__ == "__main__":
    main(measure)
