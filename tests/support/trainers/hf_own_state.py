"""One of two processes whose batch norms see only its own examples: ``hf_own_state.py RANK FOLDER``."""

import sys
from pathlib import Path

import torch
from transformers import ResNetConfig, ResNetForImageClassification, Trainer
from two_ranks import be_a_rank

from hf_eff import attach

sys.path.insert(0, str(Path(__file__).parents[2] / "hf_eff"))
from conftest import make_arguments

CASES = {
    "teacher": ({"distill": {"teacher": "ema", "ema_decay": 0.5}}, {}),
    "peers": ({"distill": {"teacher": "mutual", "peers": 2}}, {}),
    "own buffers": ({"average": {"kind": "ema"}}, {"ddp_broadcast_buffers": False}),
}


class CenteredForImageClassification(ResNetForImageClassification):
    """Training reads a buffer, so that weights tell of it."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("center", torch.zeros(1, 8, 8))

    def forward(self, pixel_values=None, labels=None, **inputs):
        if self.training:
            self.center = self.center.lerp(pixel_values.mean(0), 0.5)
        return super().forward(pixel_values=pixel_values - self.center, labels=labels, **inputs)


def train(folder, case, seed, resume=None):
    recipe, settings = CASES[case]
    torch.manual_seed(seed)
    shape = {"num_channels": 1, "embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic"}
    model = CenteredForImageClassification(ResNetConfig(num_labels=4, **shape))
    images = torch.randn(48, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * torch.arange(48).view(48, 1, 1, 1)
    data = [{"pixel_values": image, "labels": int(image.mean() > 0)} for image in images]
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2, **settings}
    trainer = Trainer(model, make_arguments(folder, **settings), train_dataset=data)
    attach(trainer, recipe)
    trainer.train(resume_from_checkpoint=resume)
    return {name: value.clone() for name, value in model.state_dict().items()}


def work(rank, folder):
    found = {}
    for case in CASES:
        whole = train(folder / case, case, seed=0)
        found[case] = whole, train(folder / f"{case} resumed", case, 9, str(folder / case / "checkpoint-2"))
    return found


if __name__ == "__main__":
    be_a_rank(work)
