"""The replicas of published results run, a few steps each, go on where they stopped, and judge by means."""

import pytest
import structured_scope
import torch
from digits28 import lenet
from replica import distillation, fp8, loss_scaling, lottery_ticket, pruning, soup
from replicas import Runs, table


def verdict(rows, start):
    (row,) = [row for row in rows if row.what.startswith(start)]
    return row.met


@pytest.mark.slow
def test_loss_scaling_replica_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(loss_scaling, "FLUSH_EVERY", 2)
    file = tmp_path / "runs.jsonl"
    rows = loss_scaling.measure(True, Runs(file))
    # these need no training to hold; the others are the benchmark's business
    assert verdict(rows, "the same where fp16 holds weights and inputs exactly")
    assert verdict(rows, "200 bad steps after 3 good ones, torch.amp.GradScaler")
    assert verdict(rows, "200 bad steps after 3 good ones, dynamic with its defaults")
    assert [row.what for row in rows if row.what.startswith("fp16, ")] == [
        f"fp16, {kind}, loss x 1e-5: flushed, accuracy, paired difference to fp32, skipped at most"
        for kind in loss_scaling.KINDS
    ]
    assert len(table(rows).splitlines()) == len(rows) + 2

    monkeypatch.setattr(loss_scaling.Training, "run", None)  # a second time everything comes from the file
    assert loss_scaling.measure(True, Runs(file)) == rows


@pytest.mark.slow
def test_fp8_replica_has_a_row_for_every_recipe(monkeypatch):
    monkeypatch.setattr(fp8, "BATCH", 2)
    monkeypatch.setattr(fp8, "VALIDATION", 2)
    rows = fp8.measure(True, Runs())
    told = [row.what for row in rows]
    for recipe in ("tensorwise", "delayed", "rowwise", "blockwise", "mx", *fp8.recipes()):
        assert any(what.startswith((f"{recipe}:", f"{recipe},")) for what in told), recipe
    assert told[2].startswith("FP8 without scales")


def test_the_recount_counts_what_a_lost_gradient_is():
    model = loss_scaling.lenet(0)
    recount = loss_scaling.Recount(model)
    output = model(torch.rand(4, 1, 28, 28))
    recount.note_output(output)
    output.sum().backward()
    lost, seen = recount.counts()
    assert lost == 0  # fp32 loses nothing
    assert seen > 4 * 10
    assert not any(module._forward_hooks for module in model)


def test_unscaled_fp8_flushes_gradients_that_e5m2_cannot_hold():
    layer = torch.nn.Linear(16, 16)
    layer.__class__ = fp8.UnscaledLinear
    x = torch.ones(1, 16, dtype=torch.bfloat16, requires_grad=True)
    (layer(x).float().sum() * 2.0**-18).backward()  # half of half the smallest e5m2
    assert not x.grad.any()
    (layer(x).float().sum() * 2.0**-16).backward()
    assert x.grad.any()


@pytest.mark.parametrize("variant", ["local", "global", "global, scores not divided"])
def test_the_scopes_of_structures_are_measured_on_shrunk_nets(monkeypatch, variant):
    monkeypatch.setattr(structured_scope, "TUNING", 1)
    torch.manual_seed(0)
    after, before, parameters, least = structured_scope.measured(
        "MLP", 0.5, variant, structured_scope.mlp(), structured_scope.Task(0)
    )
    assert 0 <= before <= 100
    assert 10 < after <= 100
    assert 30 < parameters < 50
    assert (least == 50) == (variant == "local")


@pytest.mark.slow
def test_lottery_tickets_run_with_exact_counts_and_rewinding(monkeypatch):
    monkeypatch.setattr(lottery_ticket, "AUGMENTATIONS", 1)
    rows = lottery_ticket.measure(True, Runs())
    assert [row.what.split(",")[0] for row in rows[1:4]] == ["winning ticket", "random reinit", "random mask"]
    assert rows[-1].met
    assert rows[-1].ours == "9 of 9; 6 of 6"


def test_the_rule_leaves_the_papers_shares():
    total = sum(numel for numel, _ in lottery_ticket.LAYERS)
    shares = [100 * lottery_ticket.expected(rounds) / total for rounds in (0, 4, 6, 8, 10)]
    assert shares == pytest.approx([100, 41.1, 26.3, 16.9, 10.8], abs=0.1)


def test_it_sees_weights_that_were_not_rewound():
    model = lenet(0)
    assert lottery_ticket.is_initialization(model, lenet(0))
    with torch.no_grad():
        model[1].weight[0, 0] = 0.0
        assert lottery_ticket.is_initialization(model, lenet(0))
        model[1].weight[0, 0] = -0.0
        assert not lottery_ticket.is_initialization(model, lenet(0))
        model[1].weight[0, 0] = 0.5
        assert not lottery_ticket.is_initialization(model, lenet(0))


def test_images_are_new_in_every_batch_or_copies_made_once():
    def distinct(copies):
        experiment = lottery_ticket.Experiment.on_digits(0, lottery_ticket.Training(30, 1e-3, copies))
        return len({image.numpy().tobytes() for images, _ in experiment.batches for image in images})

    assert distinct(None) == 30 * 60
    assert distinct(1) <= 1197
    assert 1197 < distinct(6) < 30 * 60


@pytest.mark.parametrize(("step", "met"), [(800, True), (850, False)])
def test_early_stopping_is_judged_by_the_mean_iterations(step, met):
    found = [{"0 none step": 500, "6 none step": step - 200}, {"0 none step": 1500, "6 none step": step + 200}]
    for run in found:
        run |= {"0 none accuracy": 90.0, "6 none accuracy": 91.0, "6 none left": 26.3}
    training = lottery_ticket.Training(1600, 1e-3)
    dense, ticket = lottery_ticket.early_rows("a name", training, found, 6, True)
    assert dense.ours == "90.00 ± 0.00, 1000 ± 707, 1 of 2"
    assert (ticket.met, ticket.ours[-5:]) == (met, f"{step / 1000:.2f}x")
    assert lottery_ticket.early_rows("a name", training, found, 6, False)[1].met is None


@pytest.mark.slow
def test_every_run_of_the_plan_is_taught_as_it_says(monkeypatch, tmp_path):
    monkeypatch.setattr(distillation, "AUGMENTATIONS", 1)
    recipes = []
    taught = distillation.Experiment.taught

    def noted(self, model, data, recipe, steps, anew):
        recipes.append((recipe.get("temperature"), recipe.get("alpha"), sorted(set(data[1].tolist()))))
        return taught(self, model, data, recipe, steps, anew)

    monkeypatch.setattr(distillation.Experiment, "taught", noted)
    file = tmp_path / "runs.jsonl"
    rows = distillation.measure(True, Runs(file))
    every = list(range(10))
    assert recipes[:3] == [(None, None, every), (None, None, [0, 1, 2, 4, 5, 6, 7, 8, 9]), (8.0, 0.0, recipes[1][2])]
    assert (8.0, 0.0, [7, 8]) in recipes
    assert (4.0, 0.1, [-100, *every]) in recipes  # images without labels are judged too
    assert len(recipes) == 1 + len(distillation.plan())
    (unseen,) = [row for row in rows if row.what.startswith("transfer set without 3s, labels alone")]
    assert unseen.met
    assert unseen.ours.startswith("0.0;")

    monkeypatch.setattr(distillation.Experiment, "taught", None)  # a second time everything comes from the file
    assert distillation.measure(True, Runs(file)) == rows


def test_the_moved_bias_brings_the_share_that_was_asked_for():
    logits = torch.randn(1000, 10, generator=torch.Generator().manual_seed(0))
    for classes, share in (([3], 0.3), ([7, 8], 0.05)):
        moved = logits.clone()
        moved[:, classes] += distillation.balancing_bias(logits, classes, share)
        found = torch.isin(moved.argmax(1), torch.tensor(classes)).float().mean().item()
        assert found == pytest.approx(share, abs=2e-3)


@pytest.mark.parametrize(("after", "met"), [([87.0, 89.1], True), ([87.0, 88.9], False)])
def test_the_missing_digit_is_judged_by_the_mean_after_the_fix(after, met):
    run = {"accuracy": 90.0, "on 3": 50.0, "bias": 2.0, "fixed": 92.0}
    found = {name: [run | {"fixed on 3": value} for value in after] for name in distillation.plan()}
    (judged,) = [row for row in distillation.transfer_rows(found) if row.target == "moved: >= 88"]
    assert judged.met == met
    assert "+2.0" in judged.ours


@pytest.mark.slow
def test_every_recipe_runs_and_leaves_the_zeros_it_promises(monkeypatch, tmp_path):
    monkeypatch.setattr(pruning, "AUGMENTATIONS", 1)
    file = tmp_path / "runs.jsonl"
    rows = pruning.measure(True, Runs(file))
    (zeros,) = [row for row in rows if row.what.startswith("runs that ended with exactly the zeros")]
    assert zeros.met
    assert zeros.ours == f"{len(pruning.variants())} of {len(pruning.variants())}"

    monkeypatch.setattr(pruning.Experiment, "run", None)  # a second time everything comes from the file
    assert pruning.measure(True, Runs(file)) == rows


def test_all_recipes_leave_the_output_layer_alone():
    assert all(recipe["skip"] == ["last"] for name, recipe in pruning.variants().items() if name != "dense")


@pytest.mark.parametrize(
    ("recipe", "right", "wrong"),
    [
        ({}, [1, 1, 1, 1], [1, 0, 1, 1]),
        ({"sparsity": 0.5}, [0, 0, 1, 1], [0, 0, 0, 1]),
        ({"sparsity": 0.5, "granularity": "n_m"}, [0, 1, 0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1]),
        ({"sparsity": 0.5, "granularity": "n_m", "n_m": "4:8"}, [0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 0, 0, 0, 1, 1, 0]),
        ({"sparsity": 0.5, "criterion": "wanda"}, [0, 1, 0, 1, 1, 1, 0, 0], [0, 1, 0, 0, 1, 1, 0, 0]),
    ],
)
def test_wrong_zeros_are_told_from_right_ones(recipe, right, wrong):
    assert pruning.is_as_asked([torch.tensor([right])], recipe)
    assert not pruning.is_as_asked([torch.tensor([wrong])], recipe)


def test_under_one_threshold_layers_may_differ_and_alone_they_may_not():
    weights = [torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 1.0]])]
    assert pruning.is_as_asked(weights, {"sparsity": 0.5})
    assert not pruning.is_as_asked(weights, {"sparsity": 0.5, "scope": "local"})


def test_verdicts_follow_the_means():
    accuracies = {"global": 90.0, "local": 89.0, "one-shot": 80.1, "random": 82.0}
    found = {"dense": [95.0, 95.0], **{f"0.98 {name}": [value, value] for name, value in accuracies.items()}}
    assert [row.met for row in pruning.compared(found, 0.98)] == [False, True]  # 9.9 points, and the trap
    found["0.98 one-shot"] = [79.9, 80.1]
    row = pruning.compared(found, 0.98)[0]
    assert row.met
    assert "80.00 (-15.00 ± 0.14)" in row.ours


@pytest.mark.slow
def test_soups_run_and_go_on_from_what_they_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(soup, "COPIES", 1)
    rows = soup.measure(True, Runs(tmp_path / "runs.jsonl"))
    monkeypatch.setattr(soup, "Experiment", None)
    assert soup.measure(True, Runs(tmp_path / "runs.jsonl")) == rows
    assert [row.target for row in rows] == [
        "never below the best", "over best >= +0.1", "over best >= +0.8",
        "never below the best", "over uniform >= +2.0", "",
    ]  # fmt: skip
    assert rows[0].met


def test_soups_are_judged_by_the_mean_of_seeds():
    def seed(test):
        names = ("best", "mean", "uniform", "greedy")
        base = {f"{name} {where}": 90.0 for name in names for where in ("chosen_on", "test", "shifted")}
        return {**base, "ingredients": 2, "greedy test": test}

    assert [row.met for row in soup.rows([seed(89.9), seed(90.4)], "members", "")] == [True, True, False]
    assert [row.met for row in soup.rows([seed(89.9), seed(90.2)], "members", "")] == [True, False, False]
    assert [row.met for row in soup.rows([seed(93.0), seed(91.0)], "members", "wild")] == [True, True, None]
