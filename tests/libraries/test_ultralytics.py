"""`efftrain.ultralytics` in YOLO's own training, on images made here. Files are recounted by this file's own code."""

import json
import os

os.environ |= {"YOLO_OFFLINE": "true", "YOLO_AUTOINSTALL": "false"}

import numpy as np
import pytest
import torch

pytest.importorskip("ultralytics", reason='ultralytics is not installed here: nox -s "libraries(ultralytics)"')

import cv2
from ultralytics import YOLO

from efftrain.ultralytics import attach
from shared_core.errors import CheckpointError, CompatibilityError

EPOCHS, PRUNE = 3, {"prune": {"sparsity": 0.75}}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return a data set of white squares."""
    root, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for split, number in (("train", 16), ("val", 4)):
        images, labels = root / "images" / split, root / "labels" / split
        images.mkdir(parents=True)
        labels.mkdir(parents=True)
        for index in range(number):
            image = random.integers(0, 60, (64, 64, 3), dtype=np.uint8)
            x, y = random.integers(8, 40, 2)
            image[y : y + 20, x : x + 20] = 230
            cv2.imwrite(str(images / f"{index}.png"), image)
            (labels / f"{index}.txt").write_text(f"0 {(x + 10) / 64} {(y + 10) / 64} {20 / 64} {20 / 64}\n")
    file = root / "data.yaml"
    file.write_text(f"path: {root}\ntrain: images/train\nval: images/val\nnames: {{0: square}}\n")
    return file


@pytest.fixture
def train(data, tmp_path):
    """Return a function that trains a small YOLO into a folder and returns the model and that folder."""

    def trained(recipe, name="run", callback=None, **options):
        model = YOLO("yolo11n.yaml")
        if recipe is not None:
            attach(model, recipe)
        for event, function in (callback or {}).items():
            model.add_callback(event, function)
        options = {"epochs": EPOCHS, "warmup_epochs": 1, "optimizer": "AdamW", "lr0": 0.01} | options
        model.train(
            data=str(data), imgsz=32, batch=4, nbs=8, device="cpu", plots=False, verbose=False, project=str(tmp_path),
            name=name, **options,
        )  # fmt: skip
        return model, tmp_path / name

    return trained


def saved(folder, name):
    """Return the weights of a file that ultralytics wrote, which this test has just made."""
    content = torch.load(folder / "weights" / name, weights_only=False)
    return (content["model"] if content["ema"] is None else content["ema"]).state_dict()


def convolutions(state):
    return {name: value for name, value in state.items() if value.ndim == 4 and "dfl" not in name}


def share_of_zeros(state):
    weights = convolutions(state).values()
    return sum(int((one == 0).sum()) for one in weights) / sum(one.numel() for one in weights)


def most_values(state):
    """Return the largest number of values in one output channel, scaled by its norm or not."""
    return max(len(row.unique()) for one in convolutions(state).values() for row in one.flatten(1))


def receipt_of(folder):
    return json.loads((folder / "eff_receipt.json").read_text())


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_without_techniques_the_files_are_those_of_ultralytics(train):
    (_, plain), (_, ours) = train(None, "plain"), train({}, "ours")
    for name in ("best.pt", "last.pt"):
        same(saved(ours, name), saved(plain, name))


def test_the_files_have_the_zeros_of_the_receipt(train):
    seen = []

    def look(trainer):
        seen.append((trainer.epoch, share_of_zeros(saved(trainer.save_dir, "best.pt"))))

    def let_the_first_be_best(trainer):
        validate = trainer.validate

        def graded():
            best, fitness = trainer.best_fitness, 1.0 / (trainer.epoch + 1)
            metrics, _ = validate()
            trainer.best_fitness = fitness if best is None else max(best, fitness)
            return metrics, fitness

        trainer.validate = graded

    callback = {"on_model_save": look, "on_train_start": let_the_first_be_best}
    model, folder = train({"prune": {"sparsity": 0.75, "end": 0.9}}, callback=callback)
    for name in ("best.pt", "last.pt"):
        assert share_of_zeros(saved(folder, name)) == pytest.approx(0.75, abs=1e-4)
    assert [epoch for epoch, _ in seen] == [0, 1, 2]
    assert seen[0][1] < 0.75
    assert share_of_zeros(model.model.state_dict()) == pytest.approx(0.75, abs=1e-4)
    receipt = receipt_of(folder)
    assert receipt["finished"]
    assert receipt["steps"]["applied"] == receipt["steps"]["planned"] == 7  # 3 with warm-up, then every second batch
    for name in ("best.pt", "last.pt"):
        assert any(note.startswith(f"{name} holds the finished average") for note in receipt["notes"])
    assert not (folder / "weights" / "last.eff.pt").exists()


def test_the_files_are_on_the_grid(train):
    _, plain = train(None, "plain")
    assert most_values(saved(plain, "best.pt")) > 500
    model, folder = train({"qat": {"scheme": "int8"}})
    for name in ("best.pt", "last.pt"):
        assert most_values(saved(folder, name)) <= 255
    assert (folder / "eff_deployment.json").is_file()
    (found,) = model.predict(np.zeros((32, 32, 3), np.uint8), imgsz=32, verbose=False)
    assert found.boxes is not None


def test_an_average_of_ours_is_in_the_files(train):
    trained = {}

    def keep(trainer):
        trained.update({name: value.clone().half() for name, value in trainer.model.state_dict().items()})

    # Callbacks run in the order they were added, so the model is finished.
    _, folder = train({"average": {"kind": "ema", "decay": 0.5}}, callback={"on_train_end": keep})
    files = saved(folder, "last.pt")
    for name, weight in convolutions(files).items():
        assert torch.equal(weight, trained[name]), name


@pytest.mark.parametrize("recipe", [PRUNE, {"qat": {"scheme": "int8"}}], ids=["prune", "qat"])
def test_a_resumed_run_ends_with_the_whole_recipe(train, tmp_path, recipe):
    def stop(trainer):
        if trainer.epoch == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(recipe, epochs=4, callback={"on_train_epoch_start": stop})
    folder = tmp_path / "run"
    assert not (folder / "eff_receipt.json").exists()
    other = (folder / "weights" / "best.pt").rename(folder / "weights" / "epoch1.pt")
    model = YOLO(other)
    attach(model, recipe)
    with pytest.raises(CompatibilityError, match=r"resume= must be last\.pt"):
        model.train(resume=True)
    model = YOLO(folder / "weights" / "last.pt")
    attach(model, recipe)
    model.train(resume=True)
    receipt = receipt_of(folder)
    assert receipt["steps"]["applied"] == receipt["steps"]["planned"]
    for name in ("best.pt", "last.pt"):
        if recipe is PRUNE:
            assert share_of_zeros(saved(folder, name)) == pytest.approx(0.75, abs=1e-4)
        else:
            assert most_values(saved(folder, name)) <= 255


def test_the_average_follows_merged_adapters(tmp_path):
    random, before = np.random.default_rng(0), {}
    for split in ("train", "val"):
        for name, brightest in (("dark", 100), ("bright", 255)):
            folder = tmp_path / "data" / split / name
            folder.mkdir(parents=True)
            for index in range(4):
                image = random.integers(0, brightest, (32, 32, 3), dtype=np.uint8)
                cv2.imwrite(str(folder / f"{index}.png"), image)

    def keep(trainer):
        before.update({name: value.clone().half() for name, value in trainer.ema.ema.state_dict().items()})

    model, key = YOLO("yolo11n-cls.yaml"), "model.10.linear.weight"
    attach(model, {"lora": {"rank": 1, "include": ["model.10.linear"], "save": "merged"}})
    model.add_callback("on_train_start", keep)
    model.train(
        data=str(tmp_path / "data"), epochs=2, imgsz=32, batch=4, nbs=4, device="cpu", plots=False, verbose=False,
        project=str(tmp_path), name="run", optimizer="AdamW", lr0=0.01,
    )  # fmt: skip
    after = saved(tmp_path / "run", "last.pt")
    change = after[key].float() - before[key].float()
    assert change.abs().max() > 1e-3


def test_a_teacher_is_refused_at_once():
    model = YOLO("yolo11n.yaml")
    with pytest.raises(CompatibilityError, match=r"distill: ultralytics models return their loss.*distill_model="):
        attach(model, {"distill": {"teacher": YOLO("yolo11n.yaml").model}})


@pytest.mark.parametrize(
    ("recipe", "options", "error", "told"),
    [
        (PRUNE, {"time": 0.1}, CompatibilityError, "time= is not supported; pass epochs="),
        ({"low_rank": {"rank": 0.5}}, {}, CheckpointError, "leave the technique out"),
    ],
)
def test_what_cannot_run_is_refused_before_training(train, tmp_path, recipe, options, error, told):
    with pytest.raises(error, match=told):
        train(recipe, **options)
    assert not [*tmp_path.glob("*/weights/*")]
