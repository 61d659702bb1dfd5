"""Train a pitch tracker on frames without labels: ``eff run train_pitch.py --model models:crepe_tiny ...``.

The script knows nothing of a teacher: ``--distill_teacher`` brings it.
"""

import importlib
from dataclasses import dataclass

import models
from transformers import HfArgumentParser, Trainer, TrainingArguments


@dataclass
class Pitch:
    """The network to train, as module:function."""

    model: str


if __name__ == "__main__":
    parser = HfArgumentParser((TrainingArguments, Pitch))
    parser.set_defaults(
        use_cpu=True, report_to=["none"], save_strategy="no", disable_tqdm=True, remove_unused_columns=False,
        label_names=["labels"], per_device_train_batch_size=models.BATCH, learning_rate=models.RATE,
    )  # fmt: skip
    args, chosen = parser.parse_args_into_dataclasses()
    module, name = chosen.model.split(":")
    model, _ = getattr(importlib.import_module(module), name)()
    trainer = Trainer(model, args, train_dataset=models.pitch_training())
    trainer.train()
    trainer.save_model()
