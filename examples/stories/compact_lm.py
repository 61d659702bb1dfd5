"""A compact language model is pre-trained, taught by a larger model, fine-tuned: what does each stage bring?

After Turc et al. 2019, "Well-Read Students Learn Better" (arXiv:1908.08962). The student has a label for one text in
20; the teacher, which learned from all labels, judges the others. Data: fragments of Python's standard library and the
package of each. One seed: a difference below 3 points says nothing. Run: python examples/stories/compact_lm.py
"""

import copy
import sys
import tempfile
from pathlib import Path

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

from hf_eff import Distillation

sys.path.append(str(Path(__file__).resolve().parents[1] / "quickstart"))
from stdlib_fragments import load_fragments, train_tokenizer

torch.set_num_threads(1)  # more only get into each other's way with models so small
PACKAGES, TOKENS = 6, 64
SPLITS = {name: [x for x in split if x.label < PACKAGES] for name, split in load_fragments().splits.items()}
TOKENIZER = train_tokenizer([x.text for x in SPLITS["train"]], 1000, TOKENS)


def examples(split):
    ids = TOKENIZER([x.text for x in SPLITS[split]], truncation=True)["input_ids"]
    return [{"input_ids": tokens, "labels": x.label} for tokens, x in zip(ids, SPLITS[split], strict=True)]


def bert(kind, width):
    set_seed(0)
    return kind(BertConfig(
        vocab_size=len(TOKENIZER), hidden_size=width, num_hidden_layers=1, num_attention_heads=4, num_labels=PACKAGES,
        intermediate_size=4 * width, max_position_embeddings=TOKENS, initializer_range=width**-0.5,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=TOKENIZER.pad_token_id,
    ))  # fmt: skip


def trained(model, rows, epochs, rate, collator=None, callbacks=()):
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, num_train_epochs=epochs, learning_rate=rate, warmup_steps=0.1, per_device_train_batch_size=32,
            use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", logging_strategy="no",
        )  # fmt: skip
        settings = {"data_collator": collator or DataCollatorWithPadding(TOKENIZER), "callbacks": list(callbacks)}
        Trainer(model, arguments, train_dataset=rows, **settings).train()
    return model


@torch.no_grad()
def tell(what, model, rows):
    batch = DataCollatorWithPadding(TOKENIZER)(rows)
    right = model.eval()(**batch).logits.argmax(-1) == batch["labels"]
    print(f"{what:36}accuracy {right.float().mean():.3f}")


if __name__ == "__main__":
    texts, test = examples("train"), examples("test")
    few, masked = texts[::20], DataCollatorForLanguageModeling(TOKENIZER, mlm_probability=0.2)
    teacher = trained(bert(BertForSequenceClassification, 96), texts, 4, 2e-3)
    language = trained(bert(BertForMaskedLM, 48), [{"input_ids": x["input_ids"]} for x in texts], 4, 5e-3, masked)

    tell(f"teacher, {len(texts)} labels", teacher, test)
    for start in ("random", "pre-trained"):
        student = bert(BertForSequenceClassification, 48)
        if start == "pre-trained":
            student.bert.load_state_dict(language.bert.state_dict(), strict=False)  # without its head for words
        tell(f"{start}, {len(few)} labels", trained(copy.deepcopy(student), few, 8, 2e-3), test)
        # the labels of these texts count for nothing
        taught = trained(student, texts, 2, 3e-3, callbacks=[Distillation(teacher=teacher, alpha=0.0)])
        tell(f"{start}, distilled", taught, test)
        tell(f"{start}, distilled, {len(few)} labels", trained(taught, few, 3, 3e-4), test)
