"""What quantization-aware training adds to a step of a small transformer, beside torchao and torch.ao."""

from __future__ import annotations

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


def step_of(model: nn.Module, width: int, tokens: int, recipe: dict[str, Any] | None = None) -> Callable[[], None]:
    session = Session(Recipe.from_dict(recipe or {}))
    session.attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    session.begin([optimizer], total_steps=1_000_000)
    inputs = torch.randn(tokens // 64, 64, width)

    def step() -> None:
        optimizer.zero_grad()
        session.loss(model(inputs).square().mean()).backward()
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


def measure(quick: bool) -> list[Row]:
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    if quick:
        return [cost(96, 128, rounds=2)]
    return [cost(384, 256, rounds=15), cost(384, 2048, rounds=5)]


if __name__ == "__main__":
    main(measure)
