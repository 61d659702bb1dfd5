"""A small teacher that counts its calls, batches in which examples come again, and what a cache of them holds."""

import torch
from torch import nn

SETTINGS = {"top_k": 3, "shard_bytes": 300}


class Teacher(nn.Module):
    def __init__(self, seed=0, words=40):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(torch.randn(words, 20, generator=generator))
        self.mix = nn.Parameter(torch.randn(20, 20, generator=generator))
        self.calls = 0

    def forward(self, input_ids, attention_mask=None):
        self.calls += 1
        return {"logits": self.table[input_ids] @ self.mix}


def batches(count=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    # few tokens, so that examples come again
    return [{"input_ids": torch.randint(0, 5, (4, 3), generator=generator)} for _ in range(count)]


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}
