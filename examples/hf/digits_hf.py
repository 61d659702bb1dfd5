"""Data, model and settings that the examples beside it share: scikit-learn's 1,797 handwritten digits, a small ViT.

Every example also takes a model that classifies images, and images, from a folder or the Hub:
    python examples/hf/pruning.py --model facebook/deit-tiny-patch16-224 --dataset uoft-cs/cifar10 --image_column img
"""

import argparse
import functools
import tempfile

import torch
from datasets import load_dataset
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

FOLDERS = tempfile.TemporaryDirectory()
torch.set_num_threads(1)  # more only get into each other's way with a model so small


def flags():
    """Return what was given on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="folder or Hub id of an image classifier; none: a small ViT, random weights")
    parser.add_argument("--dataset", help="folder or Hub id of images; none: scikit-learn's digits")
    parser.add_argument("--image_column", default="image")
    parser.add_argument("--label_column", default="label")
    parser.add_argument("--examples", type=int, default=500, help="images of each split that a named model sees")
    given = parser.parse_args()
    if given.dataset and not given.model:
        parser.error("--dataset must come with --model, whose image processor it needs")
    return given


def digits():
    """Return training and test examples."""
    given = flags()
    if given.model:
        return processed(**vars(given))
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    examples = [{"pixel_values": image, "labels": int(label)} for image, label in zip(pixels, labels, strict=True)]
    return train_test_split(examples, test_size=0.25, random_state=0)


@functools.cache
def processed(model, dataset, image_column, label_column, examples):
    """Return training and test examples as the named model takes them."""
    if dataset:
        found = load_dataset(dataset)
        splits = [found[name].shuffle(0)[:examples] for name in ("train", "test")]
    else:
        order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))[: 2 * examples].split(examples)
        images, labels = load_digits(return_X_y=True)
        pictures = [Image.fromarray((15 * image.reshape(8, 8)).astype("uint8")) for image in images]
        splits = [{image_column: [pictures[i] for i in some], label_column: labels[some]} for some in order]
    pixels = AutoImageProcessor.from_pretrained(model)
    return [
        [
            {"pixel_values": pixels(image.convert("RGB"), return_tensors="pt")["pixel_values"][0], "labels": int(label)}
            for image, label in zip(split[image_column], split[label_column], strict=True)
        ]
        for split in splits
    ]


def vision_transformer(hidden_size=32, num_hidden_layers=2):
    """Return a ViT of that size with the same random weights every time, or the named model, whose size is its own."""
    torch.manual_seed(0)
    if model := flags().model:
        labels = 1 + max(example["labels"] for example in digits()[0])
        return AutoModelForImageClassification.from_pretrained(model, num_labels=labels, ignore_mismatched_sizes=True)
    config = ViTConfig(
        image_size=8, patch_size=4, num_channels=1, num_labels=10, hidden_size=hidden_size,
        num_hidden_layers=num_hidden_layers, num_attention_heads=4, intermediate_size=2 * hidden_size,
    )  # fmt: skip
    return ViTForImageClassification(config)


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def splits():
    """Return what a Trainer takes of data: both splits, and the accuracy on the second."""
    train_set, test_set = digits()
    return {"train_dataset": train_set, "eval_dataset": test_set, "compute_metrics": accuracy}


def arguments(**settings):
    """Return plain arguments whose new folder is removed when the example ends."""
    rate = {"use_cpu": True, "learning_rate": 3e-3} if flags().model is None else {"learning_rate": 5e-5}
    defaults = {
        "output_dir": tempfile.mkdtemp(dir=FOLDERS.name), "num_train_epochs": 8, "per_device_train_batch_size": 64,
        "per_device_eval_batch_size": 450, "report_to": "none", "disable_tqdm": True, "logging_strategy": "no",
        "save_strategy": "no", "seed": 0,
    }  # fmt: skip
    return TrainingArguments(**(defaults | rate | settings))


def train(_, model=None, callbacks=(), examples=None, **settings):
    """Return the trainer after training, and its accuracy on the test set."""
    data = splits() | ({"train_dataset": examples} if examples else {})
    trainer = Trainer(model or vision_transformer(), arguments(**settings), callbacks=list(callbacks), **data)
    trainer.train()
    return trainer, trainer.evaluate()["eval_accuracy"]
