"""A run that goes back to an earlier state, or to the best one at its end, ends as one that was there all along."""

import copy
import json

import pytest
import torch
from plain_loop import backward, begun_session, plain_step, update
from promise_drivers import (
    CLIP,
    LoopOptions,
    LoopServices,
    _optimizer,
    batches,
    difference,
    hf_trainer,
    prepared_loop,
    weights_of,
)
from promise_table import NUM_STEPS, TECHNIQUES, TOGETHER, VARIANTS, Row, make_net, recipe_of
from safetensors.torch import load_file
from transformers import TrainerCallback

from shared_core import Session
from shared_core.engine.saving.state_file import rng_state, set_rng_state

GROWING = {"sparsity": 0.5, "begin": 1, "end": 3, "every": 1}


def family(key, base, field, values, **more):
    return {f"{key}-{field}-{value}": Row(key, {**base, field: value, **more}) for value in values}


UNITS = {**GROWING, "granularity": "neuron"}
LATE = {**GROWING, "begin": 3, "end": 6}
EARLY = {"scheme": "int8", "begin": 1, "freeze_observers": 3}
BLOCKS = {"include": ["*norm", "*dropout", "*hidden"]}
HIDDEN = {"hidden": ["*hidden=hidden"]}
LOW_RANK = {"rank": 4, "force": True, "min_size": 0}
OPTIONS = {
    **family("prune", GROWING, "criterion", ["random", "taylor", "movement", "fisher", "wanda"]),
    **family("prune", GROWING, "criterion", ["threshold"], threshold=0.05),
    **family("prune", GROWING, "schedule", ["one_shot", "linear", "cosine", "exponential", "iterative"]),
    **family("prune", GROWING, "granularity", ["neuron", "channel", "filter", "layer", "block"]),
    **{
        f"prune-neuron-{criterion}": Row("prune", {**UNITS, "criterion": criterion})
        for criterion in ("taylor", "fisher", "l1_norm", "l2_norm", "geometric_median", "neuron_taylor", "shapley")
    },
    "prune-channel-bn_scale": Row("prune", {**GROWING, "granularity": "channel", "criterion": "bn_scale"}),
    "prune-late-neuron-taylor": Row("prune", {**LATE, "granularity": "neuron", "criterion": "taylor"}),
    "prune-late-filter-taylor": Row("prune", {**LATE, "granularity": "filter", "criterion": "taylor"}),
    "prune-neuron-flops": Row("prune", {**UNITS, "cost": "flops"}),
    **family("prune", GROWING, "scope", ["global", "tower", "local", "erdos_renyi", "erdos_renyi_kernel"]),
    **family("prune", GROWING, "dynamic", ["recompute"]),
    **family("prune", GROWING, "regularizer", ["l1", "group_lasso", "bn_l1", "weight_decay"]),
    **family("prune", GROWING, "cost", ["bytes", "energy"]),
    **family("qat", EARLY, "range", ["ema", "minmax", "mse", "percentile", "kl", "lsq", "lsq_plus", "pact"]),
    **family(
        "qat",
        {"begin": 1},
        "scheme",
        ["int8_weight", "int8_dynamic", "int4_weight", "fp8", "fp8_block", "mxfp4", "nvfp4", "ternary", "binary"],
    ),
    **family("qat", EARLY, "fold_batch_norm", [False]),
    **family("qat", EARLY, "freeze_bn", [2]),
    **family("checkpointing", BLOCKS, "policy", ["every_k", "selective", "sqrt"]),
    **family("checkpointing", BLOCKS, "policy", ["budget:0.9995", "budget:1MiB", "budget:least"]),
    **family("average", {"begin": 1}, "kind", ["ema", "swa", "last_k"]),
    **family("average", {"kind": "ema", "begin": 1}, "bn_batches", [2]),
    **family("average", {"kind": "ema", "begin": 1}, "evaluate", [False]),
    **family("fp8", {"include": ["hidden"]}, "recipe", ["tensorwise", "rowwise", "blockwise", "mx", "s2fp8", "nvfp4"]),
    **family("lora", {"rank": 2}, "base", ["fp4", "int8", "nf4"]),
    **family("lora", {"rank": 2, "base": "none"}, "train", [["*head*"]]),
    **family("low_rank", {**LOW_RANK, "merge": True}, "decomposition", ["svd", "scaled", "whitened"]),
    **family("low_rank", LOW_RANK, "merge", [False]),
    **family("cluster", {"bits": 3, "min_size": 64}, "begin", [2, 4]),
    **family("loss_scale", {"init_scale": 1024.0}, "kind", ["static", "enhanced", "auto"]),
    **family("activations", {"min_size": 32}, "pack", ["bf16", "fp16"]),
    **family("primary_weights", {}, "kind", ["fp32_copy", "kahan"]),
    **{
        f"distill-{divergence}": Row("distill", {"divergence": divergence}, needs_teacher=True)
        for divergence in ("reverse_kl", "jsd", "soft_cross_entropy", "hard_label", "logit_mse", "bernoulli_kl")
    },
    **{
        f"distill-hidden-{loss}": Row("distill", {**HIDDEN, "hidden_loss": loss}, needs_teacher=True)
        for loss in ("mse", "cosine", "rkd", "similarity_preserving", "cka")
    },
    "distill-window": Row("distill", {"begin": 1, "end": 3, "temperature_end": 1.0}, needs_teacher=True),
    **family("dp", {"noise_multiplier": 0.5, "seed": 0}, "grad_sample_mode", ["functorch"]),
    **family("soup", {}, "kind", ["uniform"]),
    "prune-neuron+average": Row("prune", UNITS, beside={"average": {"kind": "ema", "begin": 1}}),
    "prune-neuron+qat": Row("prune", UNITS, beside={"qat": EARLY}),
    "prune+cluster": Row("prune", {**GROWING, "end": 2}, beside={"cluster": {"bits": 3, "begin": 3, "min_size": 64}}),
}
ROWS = TECHNIQUES | VARIANTS | OPTIONS
NAMES = (
    "everything",
    "prune-granularity-neuron",
    "prune-granularity-filter",
    "checkpointing-policy-budget:least",
    "distill-mutual",
)
FACTS = {
    *("recomputations", "modules_recomputed", "recomputed_share_of_forward", "predicted_peak_bytes"),
    *("measured_peak_bytes", "peak_bytes_without", "least_peak_bytes", "plan", "saved_bytes"),
    *("validations_of_average", "validations_of_weights", "emulated", "epsilon", "steps", "losses", "telemetry"),
    *("tallies", "products", "validations"),
}
"""What a receipt counts over the whole run, loaded states or not, and what was measured."""


def without_facts(told):
    if isinstance(told, dict):
        return {key: without_facts(value) for key, value in told.items() if key not in FACTS}
    return [*map(without_facts, told)] if isinstance(told, list) else told


class Stop(TrainerCallback):
    def __init__(self, at):
        self.at = at

    def on_step_end(self, args, state, control, **more):
        control.should_training_stop |= state.global_step == self.at


def trained(name, folder, *, best=None, stop=None):
    """Train with the Hugging Face Trainer; at the end the step `best` is loaded, or it stops at a step."""
    recipe, folder = ROWS[name].recipe(), folder / f"{best}-{stop}"
    options = {"save_every": 2, "eval_strategy": "steps", "eval_steps": 2, "dropout": 0.3, "seed": 0}
    if best:
        options |= {"load_best_model_at_end": True, "metric_for_best_model": "wanted", "greater_is_better": True}
    trainer = hf_trainer(recipe, folder, callbacks=[Stop(stop)] if stop else [], **options)
    trainer.compute_metrics = lambda _: {"wanted": float(trainer.state.global_step == best)}
    trainer.train()
    trainer.save_model(folder / "final")
    file = folder / "final" / "model.safetensors"  # adapters alone have another file
    saved = load_file(file) if file.exists() and "low_rank" not in recipe else weights_of(trainer.model)
    return weights_of(trainer.model), saved, json.loads((folder / "eff_receipt.json").read_text())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in ROWS if not name.startswith("ticket")])
def test_the_best_model_is_the_run_that_stopped_there(name, tmp_path):
    # each technique of these recipes has reached what it is asked for by step 6
    for best, stop in ((6, 6), (NUM_STEPS, None)):
        weights, saved, receipt = trained(name, tmp_path, best=best)
        there, _, told = trained(name, tmp_path, stop=stop)
        assert [note for note in receipt["notes"] if f"the model is the best one, checkpoint-{best}" in note]
        assert not receipt["unreached"]
        assert receipt["steps"] == {"applied": NUM_STEPS, "skipped": 0, "planned": NUM_STEPS}
        assert difference(dict(sorted(weights.items())), dict(sorted(saved.items()))) is None
        if not (name.startswith("soup") and stop):  # which is made of all checkpoints of a run
            assert difference(weights, there) is None, best
            if not name.startswith("soup"):  # whose receipt names the files of its folder
                assert without_facts(receipt["techniques"]) == without_facts(told["techniques"])


def looped(name, back=None):
    """Train in a plain loop, which once goes back to what it held at an earlier step."""
    recipe = ROWS[name].recipe()
    torch.manual_seed(0)
    model, data = make_net(0.3, recipe=recipe), batches(1)
    session = Session(recipe, services=LoopServices(model, data))
    session.attach(model)
    optimizer = _optimizer("adamw_torch", model.parameters())
    plan = {"total_steps": NUM_STEPS, "steps_per_epoch": len(data)}
    session.begin([optimizer], **plan)
    model.train()
    step, kept = 0, {}

    def clip():
        for student in (model, *session.peers):
            torch.nn.utils.clip_grad_norm_(student.parameters(), CLIP)

    while True:
        with session.swapped("checkpoint"):
            found = (model.state_dict(), optimizer.state_dict(), session.state_dict(), torch.get_rng_state())
            kept[step] = copy.deepcopy(found)
        if back and step == back[0]:
            step, back = back[1], None
            weights, state, own, random = copy.deepcopy(kept[step])
            model.load_state_dict(weights)
            session.prepare_optimizers([optimizer])
            optimizer.load_state_dict(state)
            session.load_state_dict(own)
            session.begin([optimizer], **plan)
            torch.set_rng_state(random)
        if step == NUM_STEPS:
            break
        with session.forward():
            loss = session.loss(model(**data[step % len(data)])["loss"])
        backward(session, loss)
        update(session, optimizer, clip)
        step += 1
    state = session.state_dict()
    session.finish()
    return weights_of(model), state["techniques"], without_facts(session.receipt().values["techniques"])


# soup needs a trainer, and dp never takes back what it has spent
IN_A_LOOP = [name for name, row in ROWS.items() if row.key not in ("soup", "dp")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", IN_A_LOOP)
def test_a_loop_that_goes_back_ends_as_one_that_did_not(name):
    whole = looped(name)
    for back in ((7, 2), (4, 1), (8, 5)):
        again = looped(name, back)
        assert difference(whole[0], again[0]) is None, back
        assert difference(without_facts(whole[1]), without_facts(again[1])) is None, back
        assert whole[2] == again[2], back


def in_loop(kind, recipe, folder, back):
    """Train; after the step `back` once load what was saved after step 2 and go on from there."""
    driver, model, optimizer, loader = prepared_loop(kind, recipe, folder, LoopOptions(dropout=0.3).parts(recipe))
    data, step, path = list(loader), 0, str(folder / "2")
    torch.manual_seed(0)
    model.train()
    while step < NUM_STEPS:
        driver.backward(model(**data[step % len(data)])["loss"])
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        state = {"model": model, "optimizer": optimizer, "random": rng_state()}
        if step == 2:
            driver.save_state(path) if kind == "accelerate" else driver.save(path, state)
        if step == back:
            if kind == "accelerate":
                driver.load_state(path)
            else:
                driver.load(path, state)
                set_rng_state(state["random"])
            step, back = 2, None
    if kind == "fabric":
        return weights_of(model.module)
    net = driver.unwrap_model(model)
    driver.end_training()
    return weights_of(net)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["accelerate", "fabric"])
@pytest.mark.parametrize("name", NAMES)
def test_a_script_that_loads_an_earlier_checkpoint_ends_as_one_that_did_not(kind, name, tmp_path):
    keys = [key for key in TOGETHER if key not in ("soup", "dp")]
    found = []
    for number, back in enumerate((None, 5, 7)):
        recipe = recipe_of(*keys) if name == "everything" else ROWS[name].recipe()
        found.append(in_loop(kind, recipe, tmp_path / str(number), back))
    assert difference(found[0], found[1]) is None
    assert difference(found[0], found[2]) is None


def test_steps_that_were_skipped_stay_so_when_the_best_model_is_loaded():
    model = make_net()
    session, optimizer = begun_session({"average": {"kind": "ema"}}, model, 3)
    (data, *_) = batches(1)
    plain_step(session, optimizer, model(**data)["loss"])
    best = copy.deepcopy(session.state_dict())
    plain_step(session, optimizer, model(**data)["loss"])
    session.after_step(applied=False)
    session.load_state_dict(best)
    session.begin_again()
    session.finish()
    receipt = session.receipt().values
    assert receipt["steps"] == {"applied": 2, "skipped": 1, "planned": 3}
    assert not [note for note in receipt["notes"] if "planned" in note]
