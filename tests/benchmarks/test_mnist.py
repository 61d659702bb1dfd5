"""The replicas on MNIST read its files, run a few steps each, go on where they stopped, and judge by means."""

import gzip
import struct

import pytest
import torch
from mnist import Drawn, errors, mnist
from papers import (
    compression,
    distillation,
    lottery_ticket,
    low_rank,
    one_shot_ticket,
    precision,
    privacy,
    pruning,
    quantization,
    soup,
)
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_every_layer_of_the_compressed_file_has_its_row(folder):
    rows = compression.measure(mnist(folder), True, Runs())
    layers = [row.ours.split(", ") for row in rows if row.what.startswith("layer")]
    assert [kept for kept, _, _ in layers] == ["8 %", "9 %", "26 %", "66 %", "12 %", "8 %", "19 %"]
    assert all(float(rate.removesuffix(" %")) > 0 for _, _, rate in layers)


def test_gradual_pruning_is_judged_beside_both_one_shots(folder):
    runs = Runs()
    for seed in range(pruning.SEEDS):
        for name in pruning.variants():
            others = {"4:8 SR-STE": 96.0, "0.9 at 0.6": 96.9, "0.95 gradual": 97.0, "0.95 at 0.2": 97.06 - 0.1 * seed}
            accuracy = others.get(name, 96.5)
            runs.of(f"{name}, seed {seed}", lambda accuracy=accuracy: {"accuracy": accuracy, "exact": True})
    _, worse, better, _, n_m, wider, exact = pruning.measure(((), ()), False, runs)
    assert (worse.ours, worse.met) == ("0.00 ± 0.00, -0.40 ± 0.00", False)
    assert (better.ours, better.met) == ("0.14 ± 0.16, 0.50 ± 0.00", True)
    assert (n_m.ours, n_m.met, exact.ours) == ("0.00 ± 0.00", True, "75 of 75")
    assert (wider.ours, wider.met) == ("-0.50 ± 0.00", False)
    for name in ("0.9 gradual", "4:8 SR-STE"):
        assert pruning.run(0, name, mnist(folder), 10)["exact"]


def test_each_width_is_judged_by_how_it_changes_the_number_of_errors():
    runs = Runs()
    widths = {"8 bits": 98, "4 bits": 99, "3 bits": 101, "2 bits": 111}
    for title in quantization.NETS:
        for seed in range(quantization.SEEDS):
            found = {"float": 100, "float, trained on": 90, **widths, "4 bits": 98 + seed}
            runs.of(f"{title}, seed {seed}", lambda found=found: found)
    rows = quantization.measure(((), (range(10_000),)), False, runs)
    assert [row.met for row in rows] == 2 * [None, True, True, True, False]


@pytest.mark.slow
def test_what_lsq_trains_has_so_many_bits_in_weights_and_inputs(folder, monkeypatch):
    trained = []
    monkeypatch.setattr(quantization, "WIDTHS", {2: 32.4})
    monkeypatch.setattr(quantization, "errors", lambda model, _: trained.append(model) or 0)
    quantization.run(quantization.NETS["LeNet-5, first and last layer of 8 bits"], 0, mnist(folder), True)
    two_bits, images = trained[-1], mnist(folder)[1][0]
    codes = {name: len(two_bits.get_submodule(name).weight[0].unique()) for name in ("0", "2", "5")}
    assert max(codes["2"], codes["5"]) <= 4 < codes["0"]
    seen = []
    two_bits[5].register_forward_hook(lambda layer, given, _: seen.append(given[0]))
    two_bits(images)
    moved = seen[0] + 1e-4 * seen[0].std()
    assert (two_bits[5](moved) == two_bits[5](seen[0])).float().mean() > 0.9  # a code stands for many values


def test_fp8_and_fp16_are_judged_beside_fp32(folder):
    rows = precision.measure(mnist(folder), True, Runs())
    assert rows[-1].met  # the flushes that are told are those of a count in float64
    runs = Runs()
    for seed in range(precision.SEEDS):
        accuracy = {"fp32": 97.0, "tensorwise": 96.9 + 0.1 * seed, "delayed": 96.5, "small": 90.0, "scaled": 97.0}
        for name in ("fp32", *precision.FP8):
            runs.of(f"fp8, {name}, seed {seed}", lambda reached=accuracy[name]: {"accuracy": reached})
        for name in precision.FP16:
            counts = [[[30 * (name == "small"), 60]], [[30 * (name == "small"), 60]]]
            one = {"accuracy": accuracy.get(name, 97.0), "flushed": 50.0, "counts": counts, "skipped": 1}
            runs.of(f"fp16, {name}, seed {seed}", lambda one=one: one)
    met = [row.met for row in precision.measure(mnist(folder), False, runs)]
    assert met == [None, True, False, None, True, True, True, True]


def test_factors_hold_the_share_of_weights_that_their_row_tells(folder, monkeypatch):
    trained = []
    monkeypatch.setattr(low_rank, "errors", lambda model, _: trained.append(model) or 0)
    rows = low_rank.measure(mnist(folder), True, Runs())
    sizes = [sum(value.numel() for value in model.parameters()) - 1_410 for model in trained[1:]]
    assert sizes[0] == 265_200
    assert all(f"{size / sizes[0]:.0%} of" in row.what for size, row in zip(sizes[1:], rows[1:], strict=True))


def test_a_soup_is_never_below_its_best_member_where_it_was_chosen(folder, monkeypatch):
    monkeypatch.setattr(soup, "MEMBERS", 3)
    chosen, _, _ = soup.measure(mnist(folder), True, Runs())
    assert chosen.met


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


@pytest.mark.slow
def test_students_learn_from_what_the_teacher_told(folder, tmp_path, monkeypatch):
    data = mnist(folder)
    monkeypatch.setattr(distillation, "BATCH", 30)
    monkeypatch.setattr(distillation, "TEACHER_BATCH", 30)
    monkeypatch.setattr(distillation, "HIDDEN", 30)
    rows = distillation.measure(data, True, Runs())
    papers = [row.paper.split(", ")[0] for row in rows]
    assert papers == ["67", "146", "74", "72", "206", "109", "4,730", "1,320 by -7.6"]
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
