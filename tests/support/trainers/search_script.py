"""A training of a search's candidate by the Hugging Face Trainer: ``search_script.py STUDENT OUT``."""

import sys

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

if __name__ == "__main__":
    student, out = sys.argv[1:3]
    tokens = torch.randint(1, 32, (8, 8), generator=torch.Generator().manual_seed(2)).tolist()
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(student),
        TrainingArguments(
            out, max_steps=4, per_device_train_batch_size=4, eval_strategy="steps", eval_steps=2, save_strategy="no",
            report_to=[], use_cpu=True, disable_tqdm=True,
        ),
        train_dataset=rows,
        eval_dataset=rows,
    )  # fmt: skip
    trainer.train()
    trainer.save_model(out)
