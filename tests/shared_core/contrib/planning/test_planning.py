"""What `eff plan` predicts: against two real processes, against real models, and its refusals."""

import dataclasses
import json
import runpy
from pathlib import Path

import pytest
import torch
from commands import eff, told_by
from torch import nn
from two_ranks import run_two_ranks

from shared_core.config.options import TechniqueConfig
from shared_core.contrib.planning import Cost, ModelShape, PlannedRun, plan
from shared_core.contrib.planning.plan import _NOT_COUNTED, counted_costs, memory_costs
from shared_core.engine.recipe import Recipe
from shared_core.engine.registry import REGISTRY
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError
from shared_core.privacy.config import PrivacyConfig
from shared_core.privacy.per_sample_gradients import PerSample

BENCHMARK = Path(__file__).parents[4] / "benchmarks" / "speed" / "scale.py"


@pytest.mark.slow
def test_two_processes_hold_and_send_what_was_predicted(tmp_path):
    run_two_ranks(str(BENCHMARK), tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) >= 12
    for name, values in found.items():
        measured, predicted = values["measured"], values["predicted"]
        # ranges of qat, counters and flags are the difference
        assert measured["held"] == pytest.approx(predicted["held"], rel=0.01), name
        assert measured["sent"] == pytest.approx(predicted["sent"], rel=0.01), name


def test_every_technique_has_a_line():
    for key, one in REGISTRY.items():
        counted = memory_costs.dispatch(one.config_class) is not memory_costs.dispatch(object)
        assert counted != (key in _NOT_COUNTED), key


def test_a_technique_of_a_users_own_registers_its_formula():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Mine(TechniqueConfig):
        key = "mine"

    shape, run = ModelShape.of_params(1e9), PlannedRun()
    assert memory_costs(Mine(), shape, run) == [Cost("mine", why="not counted: there is no formula for it")]
    memory_costs.register(Mine, lambda config, shape, run: [Cost("mine", held=2.0)])
    assert memory_costs(Mine(), shape, run) == [Cost("mine", held=2.0)]


@pytest.mark.parametrize("params", [1.1e9, 7e9, 70e9])
def test_a_usual_shape_has_the_parameters_asked_for(params):
    shape = ModelShape.of_params(params)
    assert 12 * shape.layers * shape.hidden**2 + shape.embeddings == pytest.approx(params, rel=0.02)


def test_zero_sharding_divides_what_is_held_by_the_ranks():
    shape = ModelShape.of_params(1e9)
    eight = plan(shape, PlannedRun(ranks=8, strategy="fsdp2"))
    copies = plan(shape, PlannedRun(ranks=8, strategy="ddp"))
    # Rajbhandari 2020: 16 bytes a parameter, of which 4 are gradients, here within the step; DDP keeps buckets
    assert eight.held == pytest.approx(1e9 * 12 / 8)
    assert copies.held == pytest.approx(1e9 * 16)
    assert copies.sent == pytest.approx(2 * 7 / 8 * 4e9)


def test_adapters_leave_moments_and_traffic_to_themselves():
    shape, run = ModelShape.of_params(7e9), PlannedRun(ranks=2, strategy="ddp", precision="16-true")
    whole, adapters = plan(shape, run), plan(shape, run, Recipe.from_dict({"lora": {"rank": 8}}))
    assert adapters.held < 0.35 * whole.held
    assert adapters.sent < 0.01 * whole.sent


def test_private_training_keeps_inputs_and_gradients_of_outputs_as_planned():
    torch.manual_seed(0)
    model = runpy.run_path(str(BENCHMARK))["Decoder"]()
    per_sample = PerSample(model, functorch=False)
    per_sample.num_examples = 2
    model(torch.randint(256, (2, 32))).square().sum().backward()
    made = [found for (found,) in per_sample._hooks.made.values()]
    assert all(found.samples is None for found in made)
    parts = {part.data_ptr(): part.nbytes for found in made for use in found.uses for part in (use.inputs, use.outputs)}
    shape, run = (
        ModelShape.of_params(851_968, layers=4, hidden=128, vocab=256),
        PlannedRun(ranks=2, strategy="fsdp2", precision="fp32", micro_batch=2, seq_len=32),
    )
    (cost,) = memory_costs(PrivacyConfig(noise_multiplier=1.0), shape, run)
    planned = cost.during - 4 * shape.params / 2  # the sum
    assert sum(parts.values()) == pytest.approx(planned, rel=0.01)


def test_policies_lessen_activations_as_their_formulas_say():
    shape, run = ModelShape.of_params(7e9), PlannedRun(precision="16-true", seq_len=1024)

    def activations(**recipe):
        return next(c.during for c in plan(shape, run, Recipe.from_dict(recipe)).costs if c.what == "activations")

    whole, layers = activations(), shape.layers
    of = {policy: activations(checkpointing={"policy": policy}) / whole for policy in ("block", "sqrt", "budget:0.5")}
    assert of["budget:0.5"] == pytest.approx(0.5)
    assert of["block"] == pytest.approx(2 / 42 + 1 / layers)  # Korthikanti 2022, table 2: 2sbh a layer, and one whole
    assert of["block"] < of["sqrt"] < 0.3
    assert activations(checkpointing={"policy": "every_k", "k": 2}) / whole == pytest.approx(0.5, abs=0.06)
    assert activations(activations={"pack": "int8"}) / whole == pytest.approx(0.55)


def test_logits_in_chunks_are_not_counted_whole_on_a_model_that_is_there():
    shape, model = ModelShape.of_params(1e8), nn.Linear(2, 2)

    def during(**options):
        recipe = Recipe.from_dict({"distill": {"teacher": "x", **options}})
        costs = counted_costs(model, PlannedRun(), recipe, touched={}, shape=shape)
        return next(cost.during for cost in costs if cost.what == "activations and logits")

    assert during() - during(chunked=True) == 2048 * shape.vocab * 10


@pytest.mark.parametrize(
    ("options", "bytes_each"),
    [({"teacher": "self"}, 4), ({"teacher": "ema"}, 4), ({"teacher": "self", "teacher_dtype": "bfloat16"}, 2)],
)
def test_a_teacher_copied_from_the_student_is_held_with_all_its_parameters(options, bytes_each):
    shape = ModelShape.of_params(1e8)
    costs = plan(shape, PlannedRun(precision="mixed"), Recipe.from_dict({"distill": options})).costs
    assert next(cost.held for cost in costs if cost.what == "distill: teacher") == bytes_each * shape.params


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "got neither"),
        (["--params", "1e9", "--model", "x"], "got both"),
        (["--params", "nan"], "--params must be a finite number"),
        (["--params", "1e6"], "params must exceed"),
        (["--params", "1e9", "--gpus", "0"], r"ranks must be in \[1,"),
        (["--params", "1e9", "--gpus", "2", "--strategy", "single"], "strategy must be single with one rank"),
        (["--params", "1e9", "--precision", "fp12"], "precision must be one of fp32, mixed, 16-true"),
        (["--params", "1e9", "--memory", "nan"], "--memory must be a finite number"),
        (["--params", "1e9", "--teacher-params", "inf"], "--teacher-params must be a finite number"),
    ],
)
def test_bad_input_is_refused(arguments, told):
    with pytest.raises(ConfigError, match=told):
        eff("plan", *arguments)


def test_config_errors_name_the_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: cannot read the file: No such file"):
        ModelShape.of_config(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        ModelShape.of_config(tmp_path)


def test_every_expert_is_counted_as_published():
    """Mixtral 8x7B has 46.7 billion parameters, Qwen3-30B-A3B 30.5, DeepSeek-MoE 16B 16.4."""
    shared = {"hidden_act": "silu", "tie_word_embeddings": False}
    mixtral = {"hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 32000, "intermediate_size": 14336,
               "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8}  # fmt: skip
    qwen = {"hidden_size": 2048, "num_hidden_layers": 48, "vocab_size": 151936, "intermediate_size": 6144,
            "head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128,
            "moe_intermediate_size": 768, "mlp_only_layers": []}  # fmt: skip
    deepseek = {"hidden_size": 2048, "num_hidden_layers": 28, "vocab_size": 102400, "intermediate_size": 10944,
                "num_attention_heads": 16, "n_routed_experts": 64, "moe_intermediate_size": 1408, "n_shared_experts": 2,
                "first_k_dense_replace": 1}  # fmt: skip
    billions = [ModelShape.of_config({**shared, **config}).params / 1e9 for config in (mixtral, qwen, deepseek)]
    assert billions == pytest.approx([46.7, 30.5, 16.4], abs=0.05)


def test_an_encoder_with_a_decoder_is_refused():
    with pytest.raises(ConfigError, match="an encoder and a decoder are not supported, got t5"):
        ModelShape.of_config({"model_type": "t5", "is_encoder_decoder": True, "d_model": 64, "num_layers": 2})


def test_the_command_sums_fits_and_refuses_pairs(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("average: {kind: ema}\nprune: {sparsity: 0.5}\n")
    line = ["plan", recipe, "--params", "7e9", "--gpus", "8"]
    found = told_by(*line, "--memory", "1000")
    assert found["fits"] is True
    assert found["held"] == pytest.approx(sum(cost["held"] for cost in found["costs"]))
    assert eff(*line, "--memory", "1").exit_code == 1
    recipe.write_text("# nothing yet\n")
    with pytest.raises(ConfigError, match="must switch on at least one technique"):
        eff(*line)
    recipe.write_text("lora: {rank: 8}\nprune: {sparsity: 0.5}\n")
    with pytest.raises(CompatibilityError):
        eff(*line)


def test_the_table_of_one_device_tells_shares_and_has_no_empty_column():
    alone, several = (eff("plan", "--params", "1e8", *more).stdout for more in ((), ("--gpus", "8")))
    assert "sent" in several
    assert "sent" not in alone
    found = json.loads(eff("plan", "--params", "1e8", "--json").stdout)
    weights = next(cost for cost in found["costs"] if cost["what"] == "weights")
    assert f"{100 * weights['held'] / found['peak']:.1f} %" in alone
