"""Parity, plain checkpoints, no-op identity, it happened, accumulation, pairs, detach: one table, both front ends."""

import itertools

import pytest
import torch
from codes import assert_codes_close, grid_step
from promise_drivers import difference, hf_trainer, run_accelerate, run_bare, run_fabric, run_hf, run_lightning
from promise_table import (
    DEVICE,
    EVERYTHING,
    NUM_STEPS,
    PAIRS,
    TECHNIQUES,
    TOGETHER,
    VARIANTS,
    DigitsNet,
    Row,
    eval_examples,
    make_net,
    recipe_of,
)
from safetensors.torch import load_file
from torch import nn

from shared_core import Session
from shared_core.checkpoint_formats.plain import read_deployment
from shared_core.errors import ConfigError, EffError, MatchError
from shared_core.low_rank import load as load_factorized
from shared_core.quantization import apply_ranges

FRONT_ENDS = {"hf": run_hf, "lightning": run_lightning}
RUNS = {**FRONT_ENDS, "accelerate": run_accelerate, "fabric": run_fabric}
REFUSED = {"accelerate": {"soup"}, "fabric": {"soup"}}
TRAINED = [key for key in EVERYTHING if key != "soup"]
CASES = [
    (key, front_end) for key, front_end in itertools.product(EVERYTHING, RUNS) if key not in REFUSED.get(front_end, ())
]
STOCK = {type(module) for module in DigitsNet().modules()} | {nn.Identity}


def clipped(run):
    """Return what the run counted of its layers' inputs."""
    layers = run.receipt["techniques"].get("qat", {}).get("per_layer", ())
    return [(entry.get("clipped"), entry.get("values")) for entry in layers]


@pytest.mark.parametrize(
    "keys",
    [
        *(pytest.param((key,), marks=pytest.mark.matrix) for key in TRAINED),
        *((key,) for key in VARIANTS),
        tuple(key for key in TOGETHER if key != "soup"),
    ],
    ids="+".join,
)
def test_parity_of_loops_lightning_and_hf(keys, tmp_path):
    bare = run_bare(recipe_of(*keys))
    for name, run in RUNS.items():
        if REFUSED.get(name, set()) & {*keys}:
            continue
        other = run(recipe_of(*keys), tmp_path / name, **({"seed": 0} if name == "hf" else {}))
        assert difference(bare.weights, other.weights) is None, name
        assert other.receipt["steps"]["applied"] == bare.receipt["steps"]["applied"] == NUM_STEPS
        assert clipped(other) == clipped(bare), name


# What goes on to the end of the run, whenever that comes.
TO_THE_END = {
    "average-swa": {"average": {"kind": "swa", "begin": 2}},
    "qat-follows": {"qat": {"scheme": "int8", "begin": 2}},
    "qat-follows-kl": {"qat": {"scheme": "int8", "range": "kl", "begin": 2}},
}


@pytest.mark.parametrize("name", [*TO_THE_END, *TRAINED, *VARIANTS])
def test_steps_after_the_planned_ones_are_as_if_they_had_been_planned(name):
    def run(planned):
        recipe = TO_THE_END.get(name) or recipe_of(name)
        recipe.get("distill", {}).pop("alpha_end", None)  # reached at the planned end
        return run_bare(recipe, max_steps=NUM_STEPS + 4, planned=planned)

    late, planned = run(NUM_STEPS), run(NUM_STEPS + 4)
    assert difference(late.weights, planned.weights) is None
    reports = [each.receipt["techniques"] for each in (late, planned)]
    plans = [told.pop("total_steps", None) for report in reports for told in report.values()]
    assert difference(*reports) is None
    assert plans in ([None] * len(plans), [NUM_STEPS, NUM_STEPS + 4])
    assert sum("continues" in note for note in late.receipt["notes"]) == 1


UPDATES = {"sparsity": 0.5, "begin": 1, "end": 6, "every": 2}
# Options that draw random numbers of their own, and that no row of the table has.
DRAWING = {
    "random-channels": {"prune": {"criterion": "random", "granularity": "channel", **UPDATES}},
    "random-neurons": {"prune": {"criterion": "random", "granularity": "neuron", **UPDATES}},
    "random-blocks": {"prune": {"criterion": "random", "granularity": "block", "block": "4x4", **UPDATES}},
    "random-overrides": {"prune": {"criterion": "random", "overrides": {"last": {"sparsity": 0.25}}, **UPDATES}},
    "shapley": {"prune": {"criterion": "shapley", "granularity": "channel", **UPDATES}},
    "stochastic-weights": {"qat": {"scheme": "int8_weight", "rounding": "stochastic"}},
    "stochastic-gradients": {"fp8": {"recipe": "nvfp4", "include": ["first"]}},
    "stochastic-moments": {"primary_weights": {"kind": "stochastic_rounding", "state_dtype": "bfloat16"}},
    "adapters": {"lora": {"rank": 2, "base": "nf4"}},
    "masks": Row("lottery", {"control": "random_mask"}, needs_ticket=True),
}


@pytest.mark.parametrize("name", DRAWING)
def test_a_seed_draws_the_same_in_a_loop_and_in_a_module_around_the_model(name, tmp_path):
    # Lightning's module puts a prefix before every name
    make = DRAWING[name].recipe if name == "masks" else DRAWING[name].copy
    assert difference(run_bare(make()).weights, run_lightning(make(), tmp_path).weights) is None


@pytest.mark.matrix
@pytest.mark.parametrize("front_end", RUNS)
def test_with_nothing_switched_on_the_bare_trainer_is_bit_equal(front_end, tmp_path):
    run, options = RUNS[front_end], {"dropout": 0.3, "shuffle": True}
    torch.manual_seed(0)
    installed = run({}, tmp_path / "installed", **options)
    torch.manual_seed(0)
    bare = run({}, tmp_path / "bare", plugin=False, **options)
    assert difference(installed.weights, bare.weights) is None


@pytest.mark.parametrize(
    ("key", "front_end"),
    [pytest.param(*case, marks=() if case[0] in TRAINED else pytest.mark.matrix) for case in CASES],
)
def test_every_checkpoint_loads_in_the_plain_model(key, front_end, tmp_path):
    result = RUNS[front_end](recipe_of(key), tmp_path, save_every=2)
    assert len(result.checkpoints) >= 4
    for path in result.checkpoints.values():
        if front_end in ("hf", "accelerate"):
            weights = load_file(path / "model.safetensors")
        elif front_end == "fabric":
            weights = torch.load(path, weights_only=True)["model"]
        else:
            content = torch.load(path, weights_only=True)["state_dict"]
            weights = {name.removeprefix("net."): tensor for name, tensor in content.items()}
        is_merged = "hidden.weight" in weights  # Fabric's behind the last step
        if f"plain_{front_end}_checkpoints" in TECHNIQUES[key].exempt and not is_merged:
            load_factorized(make_net(recipe=(key,)), weights)
        else:
            make_net(recipe=(key,)).load_state_dict(weights, strict=True)


@pytest.mark.matrix
@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_baked_weights_and_saved_ranges_are_the_trained_model_bit_for_bit(front_end, tmp_path, monkeypatch):
    images = torch.stack([row["x"] for row in eval_examples()]).to(DEVICE)
    trained = []
    finish = Session.finish

    def evaluate_and_finish(self):
        net = getattr(self.context.model, "net", self.context.model)
        with torch.no_grad():
            trained.append(net.to(DEVICE).eval()(images)["logits"])
        net.train()
        finish(self)

    monkeypatch.setattr(Session, "finish", evaluate_and_finish)
    if front_end == "hf":
        trainer = hf_trainer(recipe_of("qat"), tmp_path)
        trainer.train()
        trainer.save_model(str(tmp_path / "final"))
        weights, ranges = load_file(tmp_path / "final" / "model.safetensors"), read_deployment(tmp_path / "final")
    else:
        path = run_lightning(recipe_of("qat"), tmp_path, save_every=NUM_STEPS).checkpoints[NUM_STEPS]
        content = torch.load(path, weights_only=True)["state_dict"]
        weights = {name.removeprefix("net."): tensor for name, tensor in content.items()}
        ranges = read_deployment(path)
    plain = make_net().to(DEVICE)
    plain.load_state_dict(weights)
    with torch.no_grad():
        alone = plain.eval()(images)["logits"]
        layers = {name.removeprefix("net."): entry for name, entry in ranges["qat"]["ranges"].items()}
        ranged = apply_ranges(plain, layers)(images)["logits"]
    assert torch.equal(ranged, trained[0])
    assert not torch.equal(alone, trained[0])  # the weights alone do not quantize activations


@pytest.mark.parametrize(("key", "front_end"), CASES)
def test_the_model_comes_back_as_stock_classes_with_its_keys(key, front_end, tmp_path):
    model = RUNS[front_end](recipe_of(key), tmp_path).model
    assert {type(module) for module in model.modules()} <= STOCK
    assert list(model.state_dict()) == list(make_net(recipe=(key,)).state_dict())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not {"forward", "train"} & vars(model).keys()


# bitsandbytes' parameters (lora, lora-int8) are no plain tensors: torch cannot swap them, whoever holds them.
@pytest.mark.parametrize("name", [*EVERYTHING, *(name for name in VARIANTS if name != "lora-int8")])
def test_torch_may_swap_the_parameters_of_an_attached_model(name):
    """As `to` does for a model in tensor parallelism: it refuses tensors that anybody has a weak reference to."""
    row = (TECHNIQUES | VARIANTS)[name]
    options = row.recipe() | ({"lora": {"rank": 2, "base": "none"}} if name == "lora" else {})
    net = make_net(recipe=options)
    Session(options).attach(net)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        net.to(DEVICE)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("key", ["prune", "qat"])
def test_matching_nothing_is_an_error_before_training(key, front_end, tmp_path):
    recipe = {key: TECHNIQUES[key].options | {"include": ["decoder.*"]}}
    with pytest.raises(MatchError, match=r"include pattern 'decoder\.\*' matches no module"):
        FRONT_ENDS[front_end](recipe, tmp_path)


@pytest.mark.parametrize("key", [key for key in EVERYTHING if "accumulation" not in TECHNIQUES[key].exempt])
def test_micro_batches_equal_one_batch(key, tmp_path):
    # BatchNorm is exempt by its nature: its statistics are those of a micro-batch. SGD, because AdamW divides by the
    # size of the gradient and so makes of a rounding whatever it likes.
    for name, run in {"bare": run_bare, **RUNS}.items():
        if key in REFUSED.get(name, ()):
            continue
        options = {"batch_norm": False, "optim": "sgd"}
        one, four = (
            run(recipe_of(key), **options, accumulate=n)
            if name == "bare"
            else run(recipe_of(key), tmp_path / name / str(n), **options, accumulate=n)
            for n in (1, 4)
        )
        for tensor, weight in one.weights.items():
            if key == "qat" and weight.dim() > 1:
                assert_codes_close(four.weights[tensor], weight, grid_step(weight), max_flips=0.05)
                continue
            tolerance = 1e-4 if key == "qat" else 1e-6  # a code's share of a gradient
            torch.testing.assert_close(four.weights[tensor], weight, atol=tolerance, rtol=0)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_every_pair_runs_saves_and_finishes(pair, front_end, tmp_path):
    result = FRONT_ENDS[front_end](recipe_of(*pair), tmp_path, save_every=4)
    told = result.receipt["techniques"]
    scaled_by_plugin = front_end == "lightning" and "loss_scale" in pair
    assert set(told) | ({"loss_scale"} if scaled_by_plugin else set()) == set(pair)
    assert {type(module) for module in result.model.modules()} <= STOCK
    assert all(torch.isfinite(weight).all() for weight in result.weights.values())
    if "prune" in pair:
        assert (result.weights["hidden.weight"] == 0).float().mean() > 0.3


@pytest.mark.parametrize(
    "order", list(itertools.permutations(["Pruning", "QuantizationAwareTraining", "Distillation"]))[:6:2]
)
@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_callbacks_one_by_one_equal_one_recipe_in_any_order(front_end, order, tmp_path):
    import hf_eff
    import lightning_eff

    house = {"hf": hf_eff, "lightning": lightning_eff}[front_end]
    options = {
        "Pruning": recipe_of("prune")["prune"],
        "QuantizationAwareTraining": recipe_of("qat")["qat"],
        "Distillation": recipe_of("distill")["distill"] | ({"student": "net"} if front_end == "lightning" else {}),
    }
    callbacks = [getattr(house, name)(**options[name]) for name in order]
    together = FRONT_ENDS[front_end](recipe_of("prune", "qat", "distill"), tmp_path / "together")
    single = FRONT_ENDS[front_end]({}, tmp_path / "single", plugin=False, callbacks=callbacks)
    assert difference(together.weights, single.weights) is None


def test_a_wrong_recipe_fails_before_training_in_both_trainers(tmp_path):
    for number, (front_end, run) in enumerate(FRONT_ENDS.items()):
        with pytest.raises(EffError, match=r"within the 8 steps.*step 500"):
            run({"prune": {"sparsity": 0.5, "begin": 0, "end": 500}}, tmp_path / str(number))
        assert not list(tmp_path.glob(f"{number}/**/*.safetensors")), front_end


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_recipe_of_the_wrong_type_is_refused(front_end, tmp_path):
    import hf_eff
    import lightning_eff

    for wrong in (3, ["prune"], {"prune": 3}, {"prun": {"sparsity": 0.5}}):
        with pytest.raises(ConfigError):
            if front_end == "hf":
                hf_eff.attach(hf_trainer({}, tmp_path, plugin=False), wrong)
            else:
                lightning_eff.EffCallback(wrong)
