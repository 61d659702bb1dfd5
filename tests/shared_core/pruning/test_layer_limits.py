"""No layer is left with next to nothing: what one may lose is limited, units are compared fairly, and both are told."""

import copy
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from plain_loop import begun_session, plain_step
from sklearn.datasets import load_digits
from torch import nn
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from shared_core.errors import ConfigError, MatchError
from shared_core.lottery_ticket.technique import next_masks
from shared_core.pruning import erdos_renyi_sparsities, prune
from shared_core.pruning.targets import tower_names
from shared_core.runs import LotterySearch
from shared_core.tools.shrink import shrink


class Quiet(nn.Sequential):
    """A hidden layer, and an output layer whose weights are all smaller than any of its."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 20))
        with torch.no_grad():
            self[2].weight.mul_(1e-4)


def trained(options, steps=12):
    """Return the session of a few steps, and after each update which weights are zero."""
    model = Quiet()
    session, optimizer = begun_session({"prune": options}, model, steps, lr=1e-3)
    seen = []
    for step in range(steps):
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(step))
        plain_step(session, optimizer, model(x).square().mean())
        seen.append([model[i].weight.detach().eq(0).clone() for i in (0, 2)])
    session.finish()
    return session, seen


GROWING = {"begin": 1, "end": 8, "every": 2}


@pytest.mark.parametrize(
    "options", [{}, {"criterion": "movement"}, {"criterion": "threshold", "threshold": 10.0}, {"criterion": "taylor"}]
)
def test_an_output_layer_of_tiny_weights_keeps_two_percent_and_the_other_layer_gives_the_rest(options):
    _, seen = trained({"sparsity": 0.6, **GROWING, **options})
    hidden, output = (int(zero.sum()) for zero in seen[-1])
    assert hidden + output == round(0.6 * 2400)
    assert output == 784 or options.get("criterion") in ("movement", "taylor")  # 0.98 of 800
    assert output <= 784
    if "criterion" not in options:
        # what is pruned stays pruned while the limit binds
        assert all(not (a & ~b).any() for x, y in itertools.pairwise(seen) for a, b in zip(x, y, strict=True))


def test_a_layer_at_its_limit_is_named_once_and_the_limit_is_an_option():
    session, _ = trained({"sparsity": 0.6, **GROWING})
    said = [note for note in session.notes if "max_layer_sparsity" in note]
    assert len(said) == 1
    assert said[0].startswith("prune: 2.weight reached 98 %")
    assert "max_layer_sparsity" in said[0]
    report = session.receipt()["techniques"]["prune"]
    assert (report["capped"], report["max_layer_sparsity"], report["scope"]) == (["2.weight"], 0.98, "global")
    assert report["notes"] == said

    session, seen = trained({"sparsity": 0.6, "max_layer_sparsity": 1.0, **GROWING})
    assert int(seen[-1][1].sum()) == 799
    assert any("more than 99 %" in note and "2.weight (799 of 800)" in note for note in session.notes)

    session, seen = trained({"sparsity": 0.6, "max_layer_sparsity": 0.7, **GROWING})
    assert [int(zero.sum()) for zero in seen[-1]] == [1440 - 560, 560]
    session, _ = trained({"sparsity": 0.3, "skip": ["last"], **GROWING})
    assert not [note for note in session.notes if "max_layer_sparsity" in note or "99 %" in note]


def test_blocks_of_a_layer_are_limited_too():
    model = Quiet()
    report = prune(model, {"sparsity": 0.5, "granularity": "block", "block": "4x4"})
    assert report.capped == ["2.weight"]
    assert int(model[2].weight.eq(0).sum()) == 16 * 49  # of 50 tiles
    assert report.pruned == 16 * round(0.5 * 150)


def test_erdos_renyi_hands_out_what_limited_layers_keep():
    shapes = [(300, 784), (100, 300), (10, 100), (4, 4)]
    sizes = [a * b for a, b in shapes]
    shares = erdos_renyi_sparsities(shapes, 0.95, most=0.96)
    assert max(shares) == pytest.approx(0.96)
    assert shares[3] == 0.0
    assert sum(s * n for s, n in zip(shares, sizes, strict=True)) == pytest.approx(0.95 * sum(sizes))
    kept = [(1 - share) * n / (sum(shape)) for share, n, shape in zip(shares, sizes, shapes, strict=True)]
    assert kept[1] == pytest.approx(kept[2])  # one ε for those between the limits


def test_tickets_of_one_threshold_are_limited_and_what_no_round_could_reach_is_refused():
    model = Quiet()
    weights = {name: weight for name, weight in model.named_parameters() if weight.ndim > 1}
    masks = next_masks(weights, {}, 0.5)
    assert int(masks["2.weight"].sum()) == 16
    assert sum(int(mask.sum()) for mask in masks.values()) == 1200
    assert int(next_masks(weights, {}, 0.5, 0.5)["2.weight"].sum()) == 400
    LotterySearch(rounds=2, rate=0.2, scope="global", max_layer_sparsity=0.36)
    with pytest.raises(ConfigError, match=r"lottery: max_layer_sparsity must be at least what 3 rounds prune, 0.488"):
        LotterySearch(rounds=3, rate=0.2, scope="global", max_layer_sparsity=0.36)


def unit(inputs, outputs, stride=1):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs))


class Residual(nn.Module):
    """Three stages whose channels residual connections couple; weights shrink with the fan-in, as by default."""

    def __init__(self, widths=(10, 20, 40)):
        super().__init__()
        self.stem = unit(1, widths[0])
        self.down = nn.ModuleList(unit(a, b, 2) for a, b in itertools.pairwise(widths))
        self.blocks = nn.ModuleList(nn.Sequential(unit(w, w), nn.ReLU(), unit(w, w)) for w in widths)
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        for i, block in enumerate(self.blocks):
            x = torch.relu(self.down[i - 1](x)) if i else x
            x = torch.relu(x + block(x))
        return self.head(x.mean((2, 3)))


class Towers(nn.Module):
    """One tower for images and one for text, whose weights are a hundred times smaller."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.vision = nn.Sequential(nn.Linear(12, 30), nn.ReLU(), nn.Linear(30, 8))
        self.text = nn.Sequential(nn.Linear(12, 30), nn.ReLU(), nn.Linear(30, 8))
        with torch.no_grad():
            for parameter in self.text.parameters():
                parameter.mul_(0.01)

    def forward(self, image, text):
        return self.vision(image) @ self.text(text).T


@pytest.mark.parametrize("criterion", ["magnitude", "l2_norm", "geometric_median"])
def test_units_of_all_layers_compete_by_their_score_over_their_groups_mean(criterion):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 4)).double()
    with torch.no_grad():
        net[2].weight.mul_(0.01)
    relative = []
    for layer, reader in ((net[0], net[2]), (net[2], net[4])):
        rows = layer.weight.detach().numpy()
        score = {
            "magnitude": np.abs(np.concatenate([rows, reader.weight.detach().numpy().T], 1)).mean(1),
            "l2_norm": np.sqrt((rows**2).sum(1)),
            "geometric_median": np.sqrt(((rows[:, None] - rows[None]) ** 2).sum(2)).sum(1),
        }[criterion]
        relative.append(score / score.mean())
    gone = np.argsort(np.concatenate(relative))[:16]
    options = {"sparsity": 0.5, "granularity": "neuron", "scope": "global", "criterion": criterion}
    report = prune(net, options, [torch.ones(2, 6).double()])
    assert [entry["pruned"] for entry in report.units] == [int((gone < 12).sum()), int((gone >= 12).sum())]
    zero = torch.cat([layer.weight.eq(0).all(1) for layer in (net[0], net[2])])
    assert sorted(zero.nonzero().view(-1).tolist()) == sorted(gone.tolist())


@pytest.mark.parametrize("cost", ["none", "flops"])
@pytest.mark.parametrize("sparsity", [0.3, 0.6])
def test_no_stage_of_a_residual_net_and_no_tower_is_emptied_under_one_threshold(sparsity, cost):
    torch.manual_seed(0)
    options = {"sparsity": sparsity, "scope": "global", "cost": cost}
    report = prune(Residual(), {**options, "granularity": "channel"}, [torch.randn(2, 1, 8, 8)])
    assert all(entry["pruned"] <= 0.9 * entry["units"] for entry in report.units)
    assert sum(entry["pruned"] for entry in report.units) == round(sparsity * sum(e["units"] for e in report.units))

    inputs = [(torch.randn(2, 12), torch.randn(2, 12))]
    report = prune(Towers(), {**options, "granularity": "neuron"}, inputs)
    vision, text = report.units
    assert 0 < vision["pruned"] <= 27
    assert 0 < text["pruned"] <= 27
    # a criterion that is not a size of weights is not divided: there the limit alone keeps the tower alive
    options = {"sparsity": 0.6, "granularity": "neuron", "scope": "global", "criterion": "taylor"}
    report = prune(Towers(), options, inputs, loss=lambda model, batch: model(*batch).square().mean())
    assert max(entry["pruned"] for entry in report.units) <= 27


@pytest.mark.slow
def test_a_pruned_and_shrunk_residual_net_learns_digits_again():
    digits = load_digits()
    images = torch.tensor(digits.images[:900], dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target[:900])

    def fit(model, epochs):
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        generator = torch.Generator().manual_seed(0)
        for _ in range(epochs):
            for index in torch.randperm(600, generator=generator).split(60):
                F.cross_entropy(model.train()(images[index]), labels[index]).backward()
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            return float((model.eval()(images[600:]).argmax(1) == labels[600:]).float().mean())

    torch.manual_seed(0)
    model = Residual()
    dense = fit(model, 6)
    assert dense > 0.85
    for scope in ("auto", "global"):
        pruned = copy.deepcopy(model)
        report = prune(pruned, {"sparsity": 0.3, "granularity": "channel", "scope": scope}, [images[:2]])
        assert report.scope == ("local" if scope == "auto" else scope)
        assert all(entry["pruned"] <= 0.9 * entry["units"] for entry in report.units)
        assert fit(shrink(pruned, images[:2], latency_repeats=0).model, 3) > dense - 0.05


SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SEEN = {**SMALL, "image_size": 8, "patch_size": 4}


def two_towers():
    """CLIP with a vision tower of weights smaller than any of the text tower."""
    torch.manual_seed(0)
    model = CLIPModel(CLIPConfig(text_config={**SMALL, "vocab_size": 32}, vision_config=SEEN, projection_dim=16))
    with torch.no_grad():
        for parameter in model.vision_model.parameters():
            parameter.mul_(1e-4)
    return model


def tower_shares(model):
    """Of the vision and the text tower, without embeddings, which are not pruned."""
    towers = (model.vision_model, model.text_model)
    kinds = (nn.Linear, nn.Conv2d)
    weights = [[module.weight.flatten() for module in tower.modules() if isinstance(module, kinds)] for tower in towers]
    return [float(torch.cat(found).eq(0).float().mean()) for found in weights]


@pytest.mark.parametrize("granularity", ["unstructured", "block"])
def test_a_tower_that_one_threshold_empties_is_told_and_keeps_its_share_under_one_of_its_own(granularity):
    options = {"sparsity": 0.5, "granularity": granularity} | ({"block": "2x2"} if granularity == "block" else {})
    model = two_towers()
    report = prune(model, options)
    vision, text = tower_shares(model)
    assert vision > 0.97
    assert text < 0.2
    (told,) = (note for note in report.notes if "scope tower" in note)
    assert told.startswith(f"prune: {100 * vision:.1f} % of the weights of vision_model")
    model = two_towers()
    report = prune(model, {**options, "scope": "tower"})
    assert tower_shares(model) == pytest.approx([0.5, 0.5], abs=0.01)
    assert not any("scope tower" in note for note in report.notes)
    assert len({round(float(w.eq(0).float().mean()), 2) for n, w in model.text_model.named_parameters()
                if n.endswith("fc1.weight") or n.endswith("q_proj.weight")}) > 1  # fmt: skip


def test_towers_are_the_parts_at_the_top_of_models_as_they_come():
    text = LlamaConfig(vocab_size=32, **SMALL)
    llava = LlavaForConditionalGeneration(LlavaConfig(vision_config=CLIPVisionConfig(**SEEN), text_config=text))
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2))
    digits = nn.ModuleDict({"net": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))})
    expected = {
        llava: {"model.vision_tower", "model.language_model", "model.multi_modal_projector", "lm_head"},
        t5: {"encoder", "decoder"},
        digits: {"net"},
    }
    for model, towers in expected.items():
        names = [f"{name}.weight" for name, module in model.named_modules() if type(module) is nn.Linear]
        assert {*tower_names(names)} - {"lm_head"} == towers - {"lm_head"}
    with pytest.raises(MatchError, match=r"scope tower must find two .*, got one, net"):
        prune(digits, {"sparsity": 0.5, "scope": "tower"})
