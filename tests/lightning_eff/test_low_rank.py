"""Low rank in Lightning: a finished checkpoint, and calibration."""

from promise_drivers import difference, lightning_module, run_lightning
from promise_table import NUM_STEPS, make_net

from lightning_eff import LowRank
from shared_core.low_rank import load


def test_a_finished_checkpoint_resumed_and_loaded_is_the_trained_model(tmp_path):
    options = {"dropout": 0.3, "shuffle": True, "save_every": 4, "plugin": False}

    def run(name, **more):
        return run_lightning({}, tmp_path / name, callbacks=[LowRank(rank="energy:0.8")], **options, **more)

    whole = run("whole")
    again = run("again", resume=whole.checkpoints[NUM_STEPS])
    assert difference(whole.weights, again.weights) is None
    fresh = load(lightning_module(), whole.checkpoints[NUM_STEPS]).net
    assert difference(whole.weights, dict(fresh.state_dict())) is None


def test_inputs_are_looked_at_before_the_first_step(tmp_path):
    found = {}
    for decomposition in ("svd", "whitened"):
        recipe = {"low_rank": {"rank": 3, "calibration_batches": 4, "decomposition": decomposition}}
        result = run_lightning(recipe, tmp_path / decomposition, max_steps=1, save_every=1)
        found[decomposition] = result.receipt["techniques"]["low_rank"]
    assert found["whitened"]["calibration_batches"] == 4
    (layer,) = found["whitened"]["per_layer"]
    assert layer["output_error"] < layer["weight_error"]
    assert found["svd"]["per_layer"][0]["weight_error"] < layer["weight_error"]
    assert make_net().hidden.weight.numel() == layer["parameters_before"]
