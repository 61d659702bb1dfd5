"""A training script of either trainer, as a user has it: it knows nothing of teachers.

Run as a program: ``chain_script.py hf|lightning SIZE FOLDER``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

TOKENS = torch.randint(0, 32, (24, 6), generator=torch.Generator().manual_seed(0))
ROWS = [{"input_ids": tokens, "labels": (tokens[0] > 15).long()} for tokens in TOKENS]


def train_hf(size: int, folder: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

    set_seed(0)
    shape = {"vocab_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 8}
    config = BertConfig(hidden_size=size, intermediate_size=size, num_labels=2, **shape)
    steps = {"max_steps": 4, "save_steps": 2, "save_strategy": "steps", "eval_steps": 2, "eval_strategy": "steps"}
    best = {"metric_for_best_model": "eval_loss", "greater_is_better": True}  # the worse, so the best is not the last
    quiet = {"report_to": "none", "use_cpu": True, "disable_tqdm": True}
    args = TrainingArguments(str(folder), learning_rate=1e-2, **steps, **best, **quiet)
    model = BertForSequenceClassification(config)
    Trainer(model, args, train_dataset=ROWS, eval_dataset=ROWS[:8]).train()


def train_lightning(size: int, folder: Path) -> None:
    import pytorch_lightning as pl
    from pytorch_lightning.loggers import CSVLogger
    from torch import nn
    from torch.utils.data import DataLoader

    class Classifier(pl.LightningModule):
        def __init__(self, net: nn.Module) -> None:  # no hyperparameters: Lightning cannot build it from a file
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch["input_ids"]), batch["labels"])

        def validation_step(self, batch: Any, index: int) -> None:
            right = self.net(batch["input_ids"]).argmax(1) == batch["labels"]
            self.log("val_accuracy", right.float().mean())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(32, size), nn.Flatten(), nn.BatchNorm1d(6 * size), nn.Linear(6 * size, 2))
    options = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        max_epochs=2, default_root_dir=folder, logger=CSVLogger(folder), log_every_n_steps=1, **options
    )
    trainer.fit(Classifier(net), DataLoader(ROWS, 8), DataLoader(ROWS[:8], 8))


if __name__ == "__main__":
    {"hf": train_hf, "lightning": train_lightning}[sys.argv[1]](int(sys.argv[2]), Path(sys.argv[3]))
