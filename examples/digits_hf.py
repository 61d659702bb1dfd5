"""Data, model and Trainer that the `*_hf.py` examples share: scikit-learn's 1,797 handwritten digits, a small ViT."""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

torch.set_num_threads(1)  # more only get into each other's way with a model so small


def digits():
    """Return training and test examples."""
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    examples = [{"pixel_values": image, "labels": int(label)} for image, label in zip(pixels, labels, strict=True)]
    return train_test_split(examples, test_size=0.25, random_state=0)


def vision_transformer(hidden_size=32, num_hidden_layers=2):
    """Return a ViT of that size with the same random weights every time."""
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=8, patch_size=4, num_channels=1, num_labels=10, hidden_size=hidden_size,
        num_hidden_layers=num_hidden_layers, num_attention_heads=4, intermediate_size=2 * hidden_size,
    )  # fmt: skip
    return ViTForImageClassification(config)


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def make_trainer(folder, model=None, callbacks=(), examples=None, num_train_epochs=8, **settings):
    """Return a plain Trainer; all that the examples add are callbacks."""
    train_set, test_set = digits()
    arguments = TrainingArguments(
        folder, num_train_epochs=num_train_epochs, per_device_train_batch_size=64, per_device_eval_batch_size=450,
        learning_rate=3e-3, use_cpu=True, report_to="none", disable_tqdm=True, logging_strategy="no", seed=0,
        **({"save_strategy": "no"} | settings),
    )  # fmt: skip
    return Trainer(
        model or vision_transformer(), arguments, train_dataset=examples or train_set, eval_dataset=test_set,
        compute_metrics=accuracy, callbacks=list(callbacks),
    )  # fmt: skip


def train(folder, *arguments, **settings):
    """Return the trainer after training, and its accuracy on the test set."""
    trainer = make_trainer(folder, *arguments, **settings)
    trainer.train()
    return trainer, trainer.evaluate()["eval_accuracy"]
