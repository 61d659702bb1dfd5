"""A small net, its batches and one optimizer step: what the tests of FP8 recipes share."""

import torch
from torch import nn

from shared_core import Session
from shared_core.engine.services import Services

ALL = ["tensorwise", "delayed", "rowwise", "blockwise", "mx", "s2fp8", "hfp8", "mxfp4", "nvfp4", "int16"]

# hfp8 is refused without a scaler; nothing overflows at this scale, so no step is skipped
LOSS_SCALE = {"loss_scale": {"kind": "static", "init_scale": 256.0, "format": "fp8_e5m2"}}


class Quiet(Services):
    def __init__(self):
        self.said = []

    def say(self, text):
        self.said.append(text)

    def of_fp8(self):
        """What was said of how FP8 multiplies, not of how much of the model it does."""
        return [text for text in self.said if "fp8" in text and "multiply activations" not in text]


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 16))


def data(count=8, size=12):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 16, generator=generator) * (1 + step % 3) for step in range(count)]


def start(model, recipe="delayed", state=None, *, optimizer=torch.optim.SGD, lr=0.05, run_environment=(), **options):
    """Return a session with FP8, and the scaler that hfp8 needs, that has begun on a model, and its optimizer."""
    scaler = LOSS_SCALE if recipe == "hfp8" else {}
    session = Session({"fp8": {"recipe": recipe, **options}, **scaler}, services=Quiet(), seed=3)
    session.attach(model, run_environment)
    if state is not None:
        session.load_state_dict(state)
    made = optimizer(model.parameters(), lr=lr)
    session.begin([made], total_steps=100)
    return session, made
