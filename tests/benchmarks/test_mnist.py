"""The replicas on MNIST read its files, run a few steps each, go on where they stopped, and judge by means."""

import gzip
import struct

import pytest
import torch
from mnist import Drawn, errors, mnist
from papers import compression, distillation, lottery_ticket, one_shot_ticket, privacy, pruning
from replicas import Published, Runs, published_table, reaches

from shared_core.errors import ConfigError
from shared_core.privacy import epsilon


def idx(values):
    return struct.pack(f">{1 + values.ndim}I", 0x800 + values.ndim, *values.shape) + values.numpy().tobytes()


@pytest.fixture
def folder(tmp_path):
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", 120), ("t10k", 30)):
        images = torch.randint(256, (count, 28, 28), generator=generator, dtype=torch.uint8)
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(idx(images))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(idx(torch.arange(count, dtype=torch.uint8) % 10))
    return tmp_path


def test_files_are_read_plain_and_compressed(folder):
    (images, labels), (held, expected) = mnist(folder)
    assert (images.shape, held.shape) == ((120, 1, 28, 28), (30, 1, 28, 28))
    assert labels.tolist() == [i % 10 for i in range(120)]
    assert (images.min(), images.max()) == (0, 1)
    file = folder / "t10k-images-idx3-ubyte"
    assert held[3, 0, 2].mul(255).round().tolist() == list(file.read_bytes()[16 + 3 * 784 + 56 :][:28])
    file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
    file.unlink()
    assert torch.equal(mnist(folder)[1][0], held)
    assert expected.dtype == torch.int64


@pytest.mark.parametrize("damage", [None, lambda content: content[:-1], lambda content: content[:6], lambda _: b"PK"])
def test_other_files_are_refused(folder, damage):
    file = folder / "train-images-idx3-ubyte"
    content = file.read_bytes()
    file.unlink()
    if damage is not None:
        file.write_bytes(damage(content))
    with pytest.raises(ConfigError, match=r"^replicas: .*train-images-idx3-ubyte.*; `npm pack"):
        mnist(folder)


def test_every_image_is_drawn_once_an_epoch():
    data = torch.arange(10), torch.arange(10)
    drawn = [images.tolist() for images, _ in Drawn(data, 5, 4, seed=0)]
    assert [len(batch) for batch in drawn] == [4] * 5
    flat = [image for batch in drawn for image in batch]
    assert sorted(flat[:10]) == sorted(flat[10:]) == list(range(10))
    assert flat[:10] != flat[10:]
    assert drawn == [images.tolist() for images, _ in Drawn(data, 5, 4, seed=0)]


def test_errors_are_counted():
    model = torch.nn.Linear(10, 10, bias=False)
    torch.nn.init.eye_(model.weight)
    assert errors(model, (torch.eye(10), torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 9, 8]))) == 2


def test_tickets_start_from_their_initial_bits_and_runs_are_kept(folder, tmp_path, monkeypatch):
    file = tmp_path / "runs.jsonl"
    rows = one_shot_ticket.measure(mnist(folder), True, Runs(file))
    assert rows[-1].met
    assert rows[1].what.startswith("ticket of 20.2 %")
    monkeypatch.setattr(one_shot_ticket, "run", pytest.fail)
    assert one_shot_ticket.measure(mnist(folder), True, Runs(file)) == rows


def test_the_iterative_search_is_judged_by_the_papers_figures(tmp_path):
    runs = Runs()
    for seed in range(3):
        steps = {"0 none": 1000, "7 none": 600 + 40 * seed, "9 none": 900, "7 random_reinit": 1600}
        accuracies = {"0 none": 98.0, "7 none": 98.2, "9 none": 98.15 + 0.1 * seed, "7 random_reinit": 97.5}
        found = {f"{key} step": value for key, value in steps.items()} | {"rewound": True, "replays": 9}
        found |= {f"{key} accuracy": value for key, value in accuracies.items()}
        found |= {"9 none left": 13.5, "7 none left": 21.1, "9 none exact": True}
        runs.of(f"seed {seed}", lambda found=found: found)
    dense, best, early, faster, over, exact = lottery_ticket.measure(((), ()), False, runs)
    assert dense.why.endswith("last tenth: 0 of 3")
    assert (best.ours, best.met) == ("0.25 ± 0.10", True)
    assert (early.ours, early.met) == ("36 ± 4 %", True)
    assert (faster.ours, faster.met) == ("2.51 ± 0.16 times", True)
    assert (over.met, exact.met) == (True, True)


def test_every_layer_of_the_compressed_file_has_its_row(folder):
    rows = compression.measure(mnist(folder), True, Runs())
    layers = [row.ours.split(", ") for row in rows if row.what.startswith("layer")]
    assert [kept for kept, _, _ in layers] == ["8 %", "9 %", "26 %", "66 %", "12 %", "8 %", "19 %"]
    assert all(float(rate.removesuffix(" %")) > 0 for _, _, rate in layers)


def test_gradual_pruning_is_judged_beside_both_one_shots(folder):
    runs = Runs()
    for seed in range(pruning.SEEDS):
        for name in pruning.variants():
            others = {"0.9 at 0.6": 96.9, "0.95 gradual": 97.0, "0.95 at 0.2": 97.06 - 0.1 * seed}
            accuracy = others.get(name, 96.5)
            runs.of(f"{name}, seed {seed}", lambda accuracy=accuracy: {"accuracy": accuracy, "exact": True})
    _, worse, better, _, n_m, exact = pruning.measure(((), ()), False, runs)
    assert (worse.ours, worse.met) == ("0.00 ± 0.00, -0.40 ± 0.00", False)
    assert (better.ours, better.met) == ("0.04 ± 0.10, 0.50 ± 0.00", True)
    assert (n_m.ours, n_m.met, exact.ours) == ("0.00 ± 0.00", True, "36 of 36")
    trained = pruning.run(0, pruning.variants()["0.9 gradual"], mnist(folder), 10)
    assert trained["exact"]


def test_private_directions_and_training_stay_within_epsilon(folder, monkeypatch):
    (images, labels), test = mnist(folder)
    flat = torch.nn.functional.normalize(images.flatten(1))
    directions = privacy.private_directions(flat, 0.0, seed=0)
    captured = (flat @ directions).square().sum().item()
    assert captured == pytest.approx(torch.linalg.svdvals(flat)[:60].square().sum().item(), rel=1e-4)
    assert (flat @ privacy.private_directions(flat, 1e4, seed=0)).square().sum() < 0.5 * captured

    asked = []

    def noise_for(*asked_for, spent):
        asked.append((asked_for, spent))
        return 4.0

    monkeypatch.setattr(privacy, "noise_multiplier_for", noise_for)
    monkeypatch.setattr(privacy, "LOT", 40)
    found = privacy.run(0, 2.0, ((images, labels), test), quick=True)
    assert asked == [((2.0, 1 / 3, 3, 1e-5), [(7.0, 1.0, 1)])]  # the directions are paid for too
    assert found["epsilon"] == pytest.approx(epsilon([(7.0, 1.0, 1), (4.0, 1 / 3, 3)], 1e-5))


def test_jittered_images_are_shifted_by_up_to_two_pixels():
    images = torch.zeros(50, 1, 28, 28)
    images[:, 0, 14, 10] = 1 + torch.arange(50)
    shifted, labels = next(iter(distillation.Jittered((images, torch.arange(50)), 1, 50, seed=0)))
    found, _, down, right = shifted.nonzero(as_tuple=True)
    assert shifted.shape == images.shape
    assert torch.equal(shifted.amax((1, 2, 3)), 1.0 + labels)
    assert torch.equal(found, torch.arange(50))
    assert set(down.tolist()) == {12, 13, 14, 15, 16}
    assert set(right.tolist()) == {8, 9, 10, 11, 12}


def test_the_bias_of_a_class_is_the_one_with_the_fewest_errors():
    logits = torch.tensor([[0.0, 2.0], [0.0, 1.5], [0.0, -1.0]])
    labels = torch.tensor([0, 0, 0])
    assert distillation.wrong(logits, labels, 1, 0.0).tolist() == [True, True, False]
    assert distillation.wrong(logits, labels, 1, -1.7).tolist() == [True, False, False]
    assert distillation.best_bias(logits, labels, 1) <= -2.0
    assert distillation.best_bias(logits, torch.tensor([1, 1, 1]), 1) >= 1.0


def test_students_learn_from_what_the_teacher_told(folder, tmp_path, monkeypatch):
    data = mnist(folder)
    monkeypatch.setattr(distillation, "BATCH", 30)
    monkeypatch.setattr(distillation, "TEACHER_BATCH", 30)
    monkeypatch.setattr(distillation, "HIDDEN", 30)
    rows = distillation.measure(data, True, Runs())
    assert [row.paper.split(",")[0] for row in rows] == ["67", "146", "74", "72", "206", "109"]
    made = distillation.Experiment(data, True, tmp_path)
    monkeypatch.setattr(made, "steps", lambda *_: 30)
    threes = data[0][1] == 3
    others = data[0][0][~threes], data[0][1][~threes]
    untaught, taught = (made.taught(0, others, alpha) for alpha in (1.0, 0.0))
    kept = [torch.log_softmax(model(data[0][0][threes]) / 20, 1) for model in (made.teacher, untaught, taught)]
    apart = [torch.nn.functional.kl_div(student, kept[0], log_target=True, reduction="batchmean") for student in kept]
    assert apart[0] < apart[2] < 0.3 * apart[1]
    lengths = made.teacher[1].weight.norm(dim=1)
    assert lengths.max() < distillation.LENGTH + 0.1


@pytest.mark.parametrize(
    ("values", "paper", "lower", "met"),
    [
        ([1.0, 1.2], 1.2, False, True),
        ([1.0, 1.2], 1.3, False, False),
        ([1.0, 1.2], 1.0, True, True),
        ([1.0, 1.2], 0.9, True, False),
        ([1.0], 1.1, False, False),
    ],
)
def test_no_worse_is_within_the_standard_deviation(values, paper, lower, met):
    assert reaches(values, paper, lower=lower) == met


def test_a_row_says_what_is_worse():
    text = published_table([Published("a", "1", "2", "why", False), Published("b", "1", "2")])
    assert text.splitlines()[2:] == ["| a | 1 | 2 | why | **no** |", "| b | 1 | 2 |  |  |"]
