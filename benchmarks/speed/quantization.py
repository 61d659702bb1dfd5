"""Measure what quantization-aware training adds to a step of a small transformer, and int8 inference after it."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Collection
from typing import Any

import torch
from eff_kernels.quantization.integer_linear import sums_exactly
from measure import Row, interleaved, main, milliseconds, ratio
from torch import Tensor, nn
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
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


def transformer(width: int, depth: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(width) for _ in range(depth)])


def by_torchao(width: int, scheme: str, depth: int = 5) -> nn.Module:
    model = transformer(width, depth)
    weights = (
        IntxFakeQuantizeConfig(torch.int8, "per_channel")
        if scheme == "int8"
        else IntxFakeQuantizeConfig(torch.int4, group_size=32)
    )
    tokens = None if scheme == "int4_weight" else IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    quantize_(model, QATConfig(activation_config=tokens, weight_config=weights, step="prepare"))
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
        session.before_step()
        optimizer.step()
        session.after_step()

    return step


# scheme → largest ratio to the plain step at 256 and at 2048 tokens
SCHEMES = {"int8": (1.28, 1.10), "int4_weight": (1.20, 1.04), "int8_dynamic_int4_weight": (1.33, 1.13)}


NEAR = 1.05  # largest ratio of a compiled step to the compiled plain one


def cost(width: int, tokens: int, rounds: int) -> list[Row]:
    """Return a row for each scheme: a step beside the plain one, torchao's of the same scheme, and torch.ao's."""
    steps = {"plain": step_of(transformer(width), width, tokens)}
    steps["torch.ao"] = step_of(by_torch_ao(width), width, tokens)
    for scheme in SCHEMES:
        steps[scheme] = step_of(transformer(width), width, tokens, {"qat": {"scheme": scheme}})
        steps[f"torchao {scheme}"] = step_of(by_torchao(width, scheme), width, tokens)
    times = interleaved(steps, rounds=rounds)
    parameters = 5 * 12 * width**2 / 1e6
    rows = []
    for scheme, targets in SCHEMES.items():
        peer, found = f"torchao {scheme}", ratio(times, scheme, "plain")
        others = [f"torchao {milliseconds(times, peer)}, {ratio(times, peer, 'plain').text()}"]
        if scheme == "int8":
            # ours has a range a tensor for activations, as torch.ao; torchao one a token
            others.append(
                f"torch.ao (fbgemm) {milliseconds(times, 'torch.ao')}, {ratio(times, 'torch.ao', 'plain').text()}"
            )
        target = targets[tokens > 256]
        rows.append(
            Row(
                f"{scheme} quantization-aware training, one step at {tokens} tokens, {parameters:.1f} M parameters "
                f"(plain: {milliseconds(times, 'plain')})",
                milliseconds(times, scheme),
                "; ".join(others),
                found.text(3),
                target=f"<= {target:.2f}",
                met=found.median <= target,
            )
        )
    return rows


def compiled_cost(width: int, tokens: int, rounds: int, beside: Collection[str] = ("int8",)) -> list[Row]:
    """Return a row for each scheme: a compiled step beside the compiled plain one, of two blocks to compile less.

    Args:
        width: Of the transformer.
        tokens: A step.
        rounds: Measured.
        beside: Schemes that are measured beside torchao's too.
    """
    torch._dynamo.reset()
    steps = {"plain": step_of(transformer(width, 2), width, tokens, compiled=True)}
    for scheme in SCHEMES:
        steps[scheme] = step_of(transformer(width, 2), width, tokens, {"qat": {"scheme": scheme}}, compiled=True)
        if scheme in beside:
            steps[f"torchao {scheme}"] = step_of(by_torchao(width, scheme, 2), width, tokens, compiled=True)
    # the second step of a run has ranges for the first time and is compiled anew
    times = interleaved(steps, rounds=rounds, warmup=3)
    peers = {}
    for scheme in beside:
        peer = f"torchao {scheme}"
        peers[scheme] = f"torchao, compiled too {milliseconds(times, peer)}, {ratio(times, peer, 'plain').text()}"
    return [
        Row(
            f"{scheme} quantization-aware training, torch.compile, one step of two blocks at {tokens} tokens "
            f"(plain, compiled too: {milliseconds(times, 'plain')})",
            milliseconds(times, scheme),
            peers.get(scheme, ""),
            ratio(times, scheme, "plain").text(3),
            target=f"<= {NEAR:.2f}",
            met=ratio(times, scheme, "plain").median <= NEAR,
        )
        for scheme in SCHEMES
    ]


CONVERTED = {
    "int8 weight-only": ("int8_weight", torch.float32),
    "int8 dynamic": ("int8_dynamic", torch.float32),
    "int8 dynamic on bf16": ("int8_dynamic", torch.bfloat16),
    "int8 static": ("int8", torch.float32),
}


def inference(
    plain: nn.Module, inputs: Tensor, what: str, rounds: int, compiled: bool, calls_a_round: int = 1
) -> list[Row]:
    """Return a row for each converted model, beside the same model in fp32 and bf16 and the peers' of its scheme."""
    bits = 8 if sums_exactly("linear") else 7  # products of 8-bit weights saturate without VNNI
    models: dict[str, tuple[nn.Module, torch.dtype]] = {
        "fp32": (plain, torch.float32),
        "bf16": (copy.deepcopy(plain).bfloat16(), torch.bfloat16),
    }
    for name, (scheme, dtype) in CONVERTED.items():
        plain_name = "bf16" if dtype == torch.bfloat16 else "fp32"
        quantized = quantize(models[plain_name][0], {"scheme": scheme, "weight_bits": bits}, [inputs.to(dtype)])
        models[name] = convert(quantized, backend="torchao"), dtype
    peers = {"torchao": copy.deepcopy(plain)}
    quantize_(peers["torchao"], Int8DynamicActivationInt8WeightConfig())
    if not compiled:
        peers["torch.ao"] = torch.ao.quantization.quantize_dynamic(copy.deepcopy(plain), {nn.Linear})
    models |= {peer: (model, torch.float32) for peer, model in peers.items()}
    calls = {name: forward_of(model, inputs.to(dtype), compiled) for name, (model, dtype) in models.items()}
    exact = calls["fp32"]()
    times = interleaved(calls, rounds=rounds, calls=calls_a_round, warmup=3)
    rows = []
    for name in CONVERTED:
        noise = (calls[name]().float() - exact).square().mean()
        kernels = {entry["kernel"] for entry in conversion_report(models[name][0]).values()}
        against = {peer: ratio(times, name, peer) for peer in ("fp32", "bf16")}
        others = ["fp32", "bf16", *(peers if name == "int8 dynamic" else ())]
        rows.append(
            Row(
                f"{name} inference, {bits}-bit weights, {what}, "
                f"{'torch.compile with freezing' if compiled else 'eager'} ({'; '.join(sorted(kernels))})",
                f"{milliseconds(times, name)}; {10 * torch.log10(exact.square().mean() / noise).item():.0f} dB to fp32",
                ", ".join(f"{peer} {milliseconds(times, peer)}" for peer in others),
                f"{against['fp32'].text()} of fp32, {against['bf16'].text()} of bf16",
                # weights alone: fewer bytes, and a product in float
                target="" if name == "int8 weight-only" else "ahead of bf16",
                met=None if name == "int8 weight-only" else against["bf16"].median < 1,
            )
        )
    return rows


def of_transformer(width: int, tokens: int, rounds: int, compiled: bool) -> list[Row]:
    depth = 2 if compiled else 5
    what = f"{tokens} tokens, {12 * depth * width**2 / 1e6:.1f} M parameters"
    inputs = torch.randn(tokens // 64, 64, width)
    return inference(transformer(width, depth).eval(), inputs, what, rounds, compiled)


def of_one_row(width: int, rounds: int) -> list[Row]:
    """Return rows of what serves one request at a time."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)).eval()
    what = f"one row, {8 * width**2 / 1e6:.1f} M parameters"
    return inference(layers, torch.randn(1, width), what, rounds, compiled=False, calls_a_round=5)


def of_recurrent(width: int, rounds: int) -> list[Row]:
    """Compare LSTM and GRU on one sequence of 50 steps with float and torch.ao."""
    rows, inputs = [], torch.randn(50, 1, width)
    for kind in (nn.LSTM, nn.GRU):
        torch.manual_seed(0)
        plain = nn.Sequential(kind(width, 2 * width)).eval()
        models = {
            "ours": convert(quantize(plain, "int8_dynamic"), backend="auto"),
            "float": plain,
            "torch.ao": torch.ao.quantization.quantize_dynamic(copy.deepcopy(plain), {kind}),
        }
        calls = {name: forward_of(model, inputs, False) for name, model in models.items()}
        times, outputs = (
            interleaved(calls, rounds=rounds, calls=5, warmup=3),
            {n: call()[0] for n, call in calls.items()},
        )
        error = {name: ((y - outputs["float"]).norm() / outputs["float"].norm()).item() for name, y in outputs.items()}
        to_peer = ratio(times, "ours", "torch.ao")
        rows.append(
            Row(
                f"int8 dynamic inference of {kind.__name__}, {width} to {2 * width}, 50 steps of one sequence",
                f"{milliseconds(times, 'ours')}, error {error['ours']:.4f}",
                f"float {milliseconds(times, 'float')}, torch.ao {milliseconds(times, 'torch.ao')}, error "
                f"{error['torch.ao']:.4f}",
                f"{to_peer.text()} of torch.ao, {ratio(times, 'ours', 'float').text()} of float",
                target="<= 1.10 of torch.ao",
                met=to_peer.median <= 1.1,
            )
        )
    return rows


def forward_of(model: nn.Module, inputs: Tensor, compiled: bool) -> Callable[[], Any]:
    # an option of this call alone: the weights become constants, packed once
    call = torch.compile(model, options={"freezing": True}) if compiled else model

    @torch.no_grad()
    def forward() -> Any:
        return call(inputs)

    return forward


def measure(quick: bool, more: int = 0) -> list[Row]:
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    if quick:
        return [
            *cost(96, 128, rounds=2),
            *of_transformer(96, 128, rounds=2, compiled=False),
            *of_one_row(64, rounds=2),
            *of_recurrent(32, 2),
        ]
    rows = [*cost(384, 256, rounds=9), *cost(384, 2048, rounds=3), *compiled_cost(384, 256, rounds=15)]
    for tokens, compiled in ((512, False), (512, True), *(((64, False), (64, True)) if more else ())):
        rows += of_transformer(384, tokens, rounds=15, compiled=compiled)
    rows += [*of_one_row(1024, rounds=15), *of_recurrent(256, rounds=15)]
    return rows + (compiled_cost(384, 2048, rounds=5, beside=SCHEMES) if more else [])


if __name__ == "__main__":
    main(measure, more=0)
