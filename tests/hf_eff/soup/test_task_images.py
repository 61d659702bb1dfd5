"""`eff soup --task` on images and for regression: digits in every kind of file, scores of scipy and scikit-learn."""

import json

import numpy as np
import pytest
import torch
from commands import eff
from datasets import Dataset, Features, Image, Value
from PIL import Image as Pictures
from sklearn.datasets import load_digits
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
)

from hf_eff.evaluation import FolderEvaluator, regression_score
from shared_core.checkpoint_formats import open_ingredient
from shared_core.errors import CheckpointError, ConfigError

COUNT = 30


def weights(folder):
    ingredient = open_ingredient(folder)
    return {name: ingredient.tensor(name) for name in ingredient.specs}


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    processor = ViTImageProcessorPil(size={"height": 8, "width": 8}, do_normalize=True, image_mean=[0.5],
                                     image_std=[0.25])  # fmt: skip
    for name, outputs in (("classes", 10), ("number", 1)):
        for number in range(3):
            torch.manual_seed(number)
            config = ViTConfig(image_size=8, patch_size=4, num_channels=1, hidden_size=16, num_hidden_layers=1,
                               num_attention_heads=2, intermediate_size=16, num_labels=outputs)  # fmt: skip
            model = ViTForImageClassification(config)
            with torch.no_grad():
                model.classifier.weight.mul_(40)
            model.save_pretrained(folder / name / f"checkpoint-{number}")
            processor.save_pretrained(folder / name / f"checkpoint-{number}")
    digits = load_digits()
    images, labels = (digits.images[:COUNT] * 15).astype(np.uint8), digits.target[:COUNT]
    pixels = ((images / 255 - 0.5) / 0.25).astype(np.float32)[:, None]
    np.savez(folder / "digits.npz", images=images, labels=labels)
    np.savez(folder / "pixels.npz", pixel_values=pixels, label=labels)
    rows = []
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        path = folder / "split" / str(label) / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Pictures.fromarray(image).save(path)
        rows.append({"image": str(path.relative_to(folder)), "label": int(label)})
    Dataset.from_list(rows).to_csv(folder / "digits.csv")
    whole = [{**row, "image": str(folder / row["image"])} for row in rows]
    features = Features({"image": Image(), "label": Value("int64")})
    Dataset.from_list(whole).cast(features).to_parquet(folder / "digits.parquet")
    Dataset.from_dict({"pixel_values": pixels.tolist(), "labels": labels.tolist()}).save_to_disk(folder / "saved")
    return folder


@pytest.mark.parametrize("data", ["digits.npz", "pixels.npz", "split", "digits.csv", "digits.parquet", "saved"])
def test_images_of_every_kind_of_file_get_the_same_scores(room, data):
    folder = room / "classes" / "checkpoint-1"
    with np.load(room / "digits.npz") as held:
        pixels, labels = (torch.from_numpy(held["images"]).double() / 255 - 0.5) / 0.25, held["labels"]
    model = ViTForImageClassification.from_pretrained(folder).double().eval()
    with torch.no_grad():
        chances = model(pixel_values=pixels[:, None]).logits.log_softmax(-1)
    expected = {
        "loss": -float(chances[range(COUNT), labels].mean()),
        "accuracy": float((chances.argmax(-1).numpy() == labels).mean()),
    }
    state = weights(folder)  # transformers saves ViT under other names than it has
    for task, value in expected.items():
        assert FolderEvaluator(task, folder, room / data, batch_size=7)(state) == pytest.approx(value, rel=1e-5)


def test_the_digest_is_of_images_labels_and_processor(room, tmp_path):
    folder = room / "classes" / "checkpoint-0"
    with np.load(room / "digits.npz") as held:
        images, labels = held["images"], held["labels"]
    images[0, 0, 0] += 1
    np.savez(tmp_path / "other.npz", images=images, labels=labels)
    one, again, other = (
        FolderEvaluator("loss", folder, data).digest
        for data in (room / "digits.npz", room / "split", tmp_path / "other.npz")
    )
    assert one != other
    assert one != again  # in another order


@pytest.mark.parametrize("task", ["mse", "mae", "pearson", "spearman", "loss"])
def test_regression_scores_are_those_of_scipy_and_scikit_learn(room, task):
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import mean_absolute_error, mean_squared_error

    generator = torch.Generator().manual_seed(3)
    predicted, truth = torch.randn(40, generator=generator), torch.randint(5, (40,), generator=generator)
    reference = {
        "mse": mean_squared_error, "loss": mean_squared_error, "mae": mean_absolute_error,
        "pearson": lambda one, two: pearsonr(one, two)[0], "spearman": lambda one, two: spearmanr(one, two)[0],
    }[task]  # fmt: skip
    assert regression_score(task, predicted[:, None], truth) == pytest.approx(reference(predicted.double(), truth))
    folder = room / "number" / "checkpoint-1"
    with np.load(room / "digits.npz") as held:
        pixels, labels = (torch.from_numpy(held["images"]).double() / 255 - 0.5) / 0.25, held["labels"]
    model = ViTForImageClassification.from_pretrained(folder).double().eval()
    with torch.no_grad():
        outputs = model(pixel_values=pixels[:, None]).logits[:, 0]
    score = FolderEvaluator(task, folder, room / "digits.npz")(weights(folder))
    assert score == pytest.approx(reference(outputs, labels), rel=1e-5)


def test_texts_have_regression_too(tmp_path):
    config = BertConfig(vocab_size=24, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_labels=1,
                        intermediate_size=16, max_position_embeddings=16)  # fmt: skip
    torch.manual_seed(0)
    model = BertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path / "bert")
    ids = [[2, 5, 3], [2, 9, 8, 3], [2, 3]]
    Dataset.from_dict({"input_ids": ids, "label": [0.5, -1.0, 2.5]}).save_to_disk(tmp_path / "data")
    outputs = torch.cat([model(torch.tensor([row])).logits[:, 0] for row in ids]).detach()
    expected = float((outputs - torch.tensor([0.5, -1.0, 2.5])).abs().mean())
    score = FolderEvaluator("mae", tmp_path / "bert", tmp_path / "data")(dict(model.state_dict()))
    assert score == pytest.approx(expected, rel=1e-5)
    Dataset.from_dict({"input_ids": ids, "label": [0.5, None, 2.5]}).save_to_disk(tmp_path / "gap")
    with pytest.raises(ConfigError, match=r"finite numbers as labels .* got None"):
        FolderEvaluator("mae", tmp_path / "bert", tmp_path / "gap")


def test_correlations_of_constants_are_no_numbers():
    assert np.isnan(regression_score("pearson", torch.ones(4, 1), torch.arange(4)))
    assert np.isnan(regression_score("spearman", torch.arange(4)[:, None], torch.ones(4)))


def test_what_cannot_be_evaluated_is_refused_at_once(room, tmp_path):
    classes, number = room / "classes" / "checkpoint-0", room / "number" / "checkpoint-0"
    bare = tmp_path / "bare"
    ViTForImageClassification.from_pretrained(classes).save_pretrained(bare)
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn.npz").write_bytes((room / "digits.npz").read_bytes()[:100])
    np.savez(tmp_path / "floats.npz", images=np.zeros((2, 8, 8)), labels=np.zeros(2, dtype=int))
    np.savez(tmp_path / "lengths.npz", images=np.zeros((2, 8, 8), np.uint8), labels=np.zeros(3, dtype=int))
    np.savez(tmp_path / "far.npz", images=np.zeros((2, 8, 8), np.uint8), labels=np.array([0, 10]))
    np.savez(tmp_path / "none.npz", images=np.zeros((0, 8, 8), np.uint8), labels=np.zeros(0, dtype=int))
    np.savez(tmp_path / "pickled.npz", images=np.array([{}]), labels=np.zeros(1, dtype=int))
    files = {
        "gone.csv": "image,label\nnowhere.png,1\n", "text.csv": "text,label\ngood,1\n",
        "bare.csv": "image\nx.png\n",
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    cases = [
        ("mse", classes, room / "digits.npz", {}, CheckpointError, r"must have a regression model .* \(num_labels 10"),
        ("accuracy", number, room / "digits.npz", {}, CheckpointError, r"must have a classifier .* \(num_labels 1,"),
        ("loss", classes, tmp_path / "empty", {}, ConfigError, "a folder of images for each class"),
        ("loss", classes, tmp_path / "torn.npz", {}, CheckpointError, "must be readable"),
        ("loss", classes, tmp_path / "pickled.npz", {}, CheckpointError, "must be readable"),
        ("loss", classes, tmp_path / "floats.npz", {}, ConfigError, "images of uint8, .* got float64"),
        ("loss", classes, tmp_path / "lengths.npz", {}, ConfigError, r"labels \(3,\)"),
        ("loss", classes, tmp_path / "far.npz", {}, ConfigError, "labels from 0 to 9, .* got 10"),
        ("loss", classes, tmp_path / "none.npz", {}, ConfigError, "at least one example"),
        ("loss", classes, tmp_path / "gone.csv", {}, CheckpointError, "must be readable, got .*nowhere.png"),
        ("loss", classes, tmp_path / "text.csv", {}, ConfigError, "a column of images"),
        ("loss", classes, tmp_path / "bare.csv", {}, ConfigError, "a column label or labels"),
        ("loss", bare, room / "digits.npz", {}, CheckpointError, "image processor"),
        ("loss", classes, room / "digits.npz", {"max_length": 3}, ConfigError, "--max-length"),
        ("loss", classes, room / "gone.npz", {}, CheckpointError, "does not exist"),
    ]  # fmt: skip
    for task, folder, data, options, kind, match in cases:
        with pytest.raises(kind, match=match):
            FolderEvaluator(task, folder, data, **options)
    assert FolderEvaluator("loss", bare, room / "pixels.npz")(weights(bare)) > 0
    with pytest.raises(CheckpointError, match="tensor names of ViTForImageClassification"):
        FolderEvaluator("loss", bare, room / "pixels.npz")({"other": torch.ones(1)})


@pytest.mark.parametrize(("kind", "task"), [("classes", "accuracy"), ("number", "mae")])
def test_the_command_makes_a_soup_of_image_models(room, tmp_path, kind, task):
    arguments = ["soup", room / kind, "--task", task, "--data", room / "split", "--out", tmp_path / "soup", "--json"]
    told = json.loads(eff(*arguments).stdout)
    singles = [row["single"] for row in told["history"]]
    assert singles == sorted(singles, reverse=task == "accuracy")
    final = FolderEvaluator(task, tmp_path / "soup", room / "split")  # the processor came along
    assert final(weights(tmp_path / "soup")) == pytest.approx(told["score"], rel=1e-6)
