"""Ingredients that the tests of soups share."""

import torch


def runs(count, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    base = {"a": torch.randn(33, 7, generator=generator), "b": torch.randn(5, generator=generator)}
    return [
        {name: (value + 0.1 * torch.randn(value.shape, generator=generator)).to(dtype) for name, value in base.items()}
        for _ in range(count)
    ]


def same_bits(one, two):
    return one.dtype == two.dtype and torch.equal(
        one.contiguous().view(torch.uint8), two.contiguous().view(torch.uint8)
    )
