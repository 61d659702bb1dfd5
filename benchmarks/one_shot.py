"""Measure the loss that pruning and quantizing a small Llama after training cost: ``python benchmarks/one_shot.py``."""

from __future__ import annotations

import copy
import math

import torch
from measure import device, today, versions
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from shared_core.pruning import prune
from shared_core.quantization import quantize_with_report

VOCABULARY, HISTORY = 64, 8
SKIP = ("lm_head", "model.embed_tokens")
PRUNED = {"0.5": {"sparsity": 0.5}, "2:4": {"sparsity": 0.5, "granularity": "n_m"}, "0.7": {"sparsity": 0.7}}
ROUNDED = {
    f"{bits} bits{', symmetric' * (scheme != 'int4_weight')}": {"scheme": scheme, "group_size": 32, "weight_bits": bits}
    for scheme in ("int4_weight", "W4A16") for bits in (4, 3)
} | {f"{bits} bits per channel": {"scheme": "int8_weight", "weight_bits": bits} for bits in (8, 4)}  # fmt: skip
SOLVERS = {"rounded": None} | {
    f"{grid}{', actorder' * actorder}": {"actorder": actorder, "grid": grid}
    for grid in ("pinned", "published") for actorder in (False, True)
}  # fmt: skip


def batches(count: int, generator: torch.Generator) -> list[Tensor]:
    """Return texts of a chain of second order whose next token is known with a probability of 0.9."""
    table = torch.randint(VOCABULARY, (VOCABULARY, HISTORY), generator=torch.Generator().manual_seed(5))
    text = torch.randint(VOCABULARY, (count, 8, 32), generator=generator)
    surprises = torch.rand(count, 8, 32, generator=generator) > 0.9
    for t in range(2, 32):
        known = table[text[..., t - 1], text[..., t - 2] % HISTORY]
        text[..., t] = torch.where(surprises[..., t], text[..., t], known)
    return list(text)


def trained(texts: list[Tensor]) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for text in texts:
        model(input_ids=text, labels=text).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def main() -> None:
    """Train, compress in every way from the same weights, and print a table."""
    generator = torch.Generator().manual_seed(1)
    model, unseen = trained(batches(900, generator)), batches(20, generator)
    calibration = [{"input_ids": text} for text in batches(8, generator)]

    @torch.no_grad()
    def loss(model: torch.nn.Module) -> str:
        return f"{sum(model(input_ids=text, labels=text).loss.item() for text in unseen) / len(unseen):.3f}"

    print(f"{device()}, {today()}, torch {versions()['torch']}; dense {loss(model)}")
    for name, options in PRUNED.items():
        found = []
        for criterion in ("magnitude", "wanda", "sparsegpt"):
            scope = "global" if criterion == "wanda" else "local"  # wanda shares out by row in either
            pruned = copy.deepcopy(model)
            prune(pruned, {**options, "criterion": criterion, "scope": scope, "skip": SKIP}, calibration)
            found.append(f"{criterion} {loss(pruned)}")
        print(f"{name}: {', '.join(found)}")
    for name, options in ROUNDED.items():
        found, errors = [], {}
        for solver, gptq in SOLVERS.items():
            made, report = quantize_with_report(model, {**options, "skip": SKIP}, calibration, gptq=gptq)
            found.append(f"{solver} {loss(made)}")
            errors[solver] = [math.log(e["output_error"]) for e in report.layers if "output_error" in e]
        print(f"{name}: {', '.join(found)}")
        for end in ("", ", actorder"):
            # the objective is the square of this error
            pairs = zip(errors[f"published{end}"], errors[f"pinned{end}"], strict=True)
            ratios = [math.exp(2 * (published - pinned)) for published, pinned in pairs]
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            print(f"  objective, published / pinned{end}: {mean:.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
