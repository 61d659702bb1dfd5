"""Flags of techniques in training arguments, and what changes them later: a search, whose loop is short here."""

import copy
import dataclasses
import inspect
import json
import pickle
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils.memory import release_memory
from transformers import HfArgumentParser, Seq2SeqTrainingArguments, Trainer, TrainingArguments
from transformers.trainer_utils import HPSearchBackend
from trl import SFTConfig

from hf_eff import (
    EffCallback,
    EffFlags,
    EffTrainer,
    EffTrainingArguments,
    Pruning,
    QuantizationAwareTraining,
    attach,
    with_eff,
)
from shared_core.cli.arguments import describe_flags
from shared_core.engine.registry import flags
from shared_core.errors import ConfigError, MatchError
from shared_core.front_ends.flags import take_flags

OPTIONS = {
    "matmul": "precision",
    "low_rank": "rank decomposition calibration_batches conv force multiple_of merge include skip min_size",
    "lora": "rank alpha dropout base save double_quant requantize include skip min_size train",
    "primary_weights": "kind state_dtype telemetry_every",
    "prune": (
        "sparsity criterion threshold permutations cost granularity n_m block schedule initial_sparsity begin end "
        "every scope max_layer_sparsity dynamic drop_share sr_ste regularizer regularizer_strength include skip "
        "min_size overrides"
    ),
    "lottery": (
        "out rewind rate output_rate conv_rate scope max_layer_sparsity seed include skip min_size ticket rewind_to "
        "control"
    ),
    "cluster": "bits bits_of begin include skip min_size",
    "qat": (
        "scheme weights init inputs symmetric begin freeze_observers fold_batch_norm freeze_bn range ema_constant "
        "percentile clip_gelu weight_bits activation_bits group_size rounding gate recompute_weights "
        "calibration_batches include skip min_size overrides keep"
    ),
    "fp8": "recipe format amax_history backend max_skips include skip min_size",
    "checkpointing": "policy k include",
    "activations": "pack offload min_size group_size sparse",
    "distill": (
        "teacher peers teacher_weights teacher_dtype trust_remote_code ema_decay divergence beta temperature "
        "temperature_end scale_by_temperature alpha alpha_end confidence unlabeled_field vocab_size chunked "
        "budget_mib begin end hidden hidden_loss hidden_weight attention attention_weight init_layers student "
        "logits causal"
    ),
    "loss_scale": (
        "kind init_scale growth_factor backoff_factor growth_interval min_scale max_skips floor floor_window "
        "floor_overflows format margin smoothing telemetry_every flush_every histogram_every"
    ),
    "dp": (
        "noise_multiplier target_epsilon max_grad_norm delta accountant grad_sample_mode check_loss secure_mode seed"
    ),
    "comm": "hook rank begin",
    "average": "kind decay warmup begin every k evaluate bn_batches",
    "soup": ("kind metric mode strict min_delta order seed repeat weights last max_ingredients rank bn_batches"),
}
FLAGS = [f"{key}_{name}" for key, names in OPTIONS.items() for name in names.split()]


def parse(*arguments):
    parsed, *_ = HfArgumentParser(EffTrainingArguments).parse_args_into_dataclasses(
        ["--output_dir", "out", "--report_to", "none", *arguments]
    )
    return parsed


def test_the_flags_are_these():
    stock = {field.name for field in dataclasses.fields(TrainingArguments)}
    ours = [field.name for field in dataclasses.fields(EffTrainingArguments) if field.name not in stock]
    assert ours == [*FLAGS, "eff_recipe", "eff_allow_partial"]
    assert all(getattr(EffTrainingArguments(output_dir="out"), name) is None for name in ours)


@pytest.mark.parametrize("arguments_class", [TrainingArguments, Seq2SeqTrainingArguments, SFTConfig])
def test_no_flag_is_a_field_of_the_trainers_arguments(arguments_class):
    fields = {field.name for field in dataclasses.fields(arguments_class)}
    assert not fields & {*flags(), "eff_recipe"}
    made = with_eff(arguments_class)
    assert issubclass(made, (arguments_class, EffFlags))
    assert with_eff(arguments_class) is made


def test_a_field_with_the_name_of_a_flag_is_refused():
    @dataclasses.dataclass
    class Taken(TrainingArguments):
        prune_sparsity: float = 0.0

    with pytest.raises(ConfigError, match="prune_sparsity"):
        with_eff(Taken)


def test_the_command_line_gives_a_recipe():
    parsed = parse(
        "--prune_sparsity", "0.8", "--prune-begin", "0.1", "--prune_skip", "last", "first", "--prune_scope", "local",
        "--distill_teacher", "runs/teacher", "--soup_kind", "greedy", "--soup_strict", "true", "--qat_scheme", "int8",
        "--loss_scale_kind", "dynamic", "--loss_scale_init_scale", "1e3",
    )  # fmt: skip
    recipe = parsed.recipe
    assert list(recipe) == ["prune", "qat", "distill", "loss_scale", "soup"]
    assert recipe["prune"].skip == ("last", "first")
    assert recipe["prune"].begin == "0.1"
    assert recipe["soup"].strict is True
    assert recipe["loss_scale"].init_scale == 1000.0
    assert not parse().recipe


def test_yaml_json_and_dict_give_the_same_arguments(tmp_path):
    stock = {"output_dir": "out", "report_to": "none"}
    values = {**stock, "prune_sparsity": 1e-3, "prune_skip": ["last"], "prune_begin": 5}
    (tmp_path / "a.json").write_text(json.dumps(values))
    (tmp_path / "a.yaml").write_text(
        "output_dir: out\nreport_to: none\nprune_sparsity: 1e-3\nprune_skip: [last]\nprune_begin: 5\n"
    )
    parser = HfArgumentParser(EffTrainingArguments)
    (from_dict,) = parser.parse_dict(values)
    (from_json,) = parser.parse_json_file(str(tmp_path / "a.json"))
    (from_yaml,) = parser.parse_yaml_file(str(tmp_path / "a.yaml"))
    assert from_yaml.prune_sparsity == 0.001
    assert isinstance(from_yaml.prune_sparsity, float)
    assert from_dict.recipe == from_json.recipe == from_yaml.recipe
    assert from_yaml.recipe["prune"].begin == 5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prune_sparsity": 1.5}, r"prune.*sparsity must be in \[0, 1\), got 1.5"),
        ({"prune_sparsity": float("nan")}, "sparsity must be a finite number"),
        ({"prune_begin": 0.2}, "--prune_begin needs --prune_sparsity"),
        ({"prune_sparsity": 0.5, "prune_schedule": "cubik"}, "did you mean 'cubic'"),
        ({"prune_sparsity": 0.5, "prune_end": 1.5}, "end must be a step"),
        ({"eff_recipe": "missing.yaml"}, "cannot read missing.yaml"),
    ],
)
def test_a_wrong_flag_is_refused_with_its_rule(values, message):
    with pytest.raises(ConfigError, match=message):
        EffTrainingArguments(output_dir="out", **values)


def test_a_recipe_file_joins_the_flags(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("prune: {sparsity: 5e-1}\n")
    both = EffTrainingArguments(output_dir="out", eff_recipe=str(file), qat_scheme="int8")
    assert list(both.recipe) == ["prune", "qat"]
    assert both.recipe["prune"].sparsity == 0.5
    with pytest.raises(ConfigError, match="prune was given twice"):
        EffTrainingArguments(output_dir="out", eff_recipe=str(file), prune_sparsity=0.5)


def test_arguments_round_trip(tmp_path):
    arguments = EffTrainingArguments(output_dir="out", prune_sparsity="0.5", prune_skip=["last"], prune_begin="2ep")
    again = dataclasses.replace(arguments, prune_sparsity=0.25)
    assert again != arguments
    assert [*inspect.signature(EffTrainingArguments).parameters] == [
        *inspect.signature(TrainingArguments).parameters,
        *sorted(field.name for field in dataclasses.fields(EffFlags)),
    ]
    assert again.recipe["prune"].sparsity == 0.25
    assert again.recipe["prune"].skip == ("last",)
    assert pickle.loads(pickle.dumps(arguments)) == arguments
    kept = json.loads(arguments.to_json_string())
    restored = EffTrainingArguments(**{name: kept[name] for name in ("output_dir", *FLAGS)})
    assert restored.recipe == arguments.recipe


@pytest.mark.parametrize("base", [Seq2SeqTrainingArguments, SFTConfig])
def test_other_arguments_pickle_where_nobody_made_their_class(base, tmp_path):
    arguments = with_eff(base)(output_dir="out", prune_sparsity=0.5, use_cpu=True, bf16=False)
    torch.save(arguments, tmp_path / "training_args.bin")
    with_eff.cache_clear()
    again = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert again.recipe == arguments.recipe
    assert isinstance(again, base)


def test_help_is_complete_and_the_group_holds_only_our_flags():
    text = HfArgumentParser(EffTrainingArguments).format_help()
    assert all(f"--{flag}" in text for flag in FLAGS)
    separate = HfArgumentParser((TrainingArguments, EffFlags)).format_help()
    title = "efficient training:\n"
    assert title not in text
    assert "--prune_sparsity" in separate.split(title)[1]
    assert "--learning_rate" not in separate.split(title)[1]


@pytest.mark.parametrize("own_schedule", [False, True])
def test_a_stock_trainer_does_not_ignore_the_flags(make, tmp_path, own_schedule):
    model = make.classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = {"optimizers": (optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))} if own_schedule else {}
    trainer = make.trainer(tmp_path, model=model, extra=own, arguments_class=EffTrainingArguments, prune_sparsity=0.5)
    assert type(trainer) is Trainer
    assert trainer.args.to_dict()["auto_find_batch_size"] is False
    for again in (copy.deepcopy(trainer.args), pickle.loads(pickle.dumps(trainer.args))):
        assert again.to_dict() == trainer.args.to_dict()
    with pytest.raises(ConfigError, match=r"applied prune.*EffTrainer"):
        trainer.train()
    session = attach(trainer)
    trainer.train()
    assert session.receipt()["techniques"]["prune"]["sparsity"] == pytest.approx(0.5, abs=1e-3)


def test_flags_reach_eff_trainer_and_join_its_recipe(make, tmp_path):
    trainer = make.trainer(
        tmp_path, trainer_class=EffTrainer, arguments_class=EffTrainingArguments, prune_sparsity=0.5,
        extra={"recipe": {"qat": {"scheme": "int8"}}},
    )  # fmt: skip
    assert list(trainer.session.recipe) == ["prune", "qat"]
    assert attach(trainer) is trainer.session


@pytest.mark.parametrize("arguments_class", [Seq2SeqTrainingArguments, SFTConfig])
def test_eff_run_leaves_the_trainers_own_flags_alone(arguments_class):
    own = [f"--{prefix}{field.name}" for field in dataclasses.fields(arguments_class) for prefix in ("", "no_")]
    assert take_flags(own) == ({}, own)


def test_help_of_every_flag_is_a_sentence_with_its_range_and_default():
    parser = HfArgumentParser(EffFlags)
    shown = {action.dest: parser._get_formatter()._expand_help(action) for action in parser._actions}
    shown.pop("help")
    assert all(text.endswith(".") and "None" not in text for text in shown.values())
    meanings = {row["flag"].removeprefix("--"): row["help"] for row in describe_flags()}
    assert shown["prune_sparsity"] == f"{meanings['prune_sparsity']} Switches prune on."
    assert shown["distill_beta"] == f"{meanings['distill_beta']} Default: 0.5."
    assert "[0, 1]" in meanings["distill_beta"]
    assert shown["low_rank_skip"].endswith("Default: last.")
    assert "--prune_sparsity NUMBER" in parser.format_help()


def small(folder, **flags):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 4))
    torch.nn.utils.parametrizations.weight_norm(net[0])  # out of reach: its weight is computed
    return net, EffTrainingArguments(str(folder), use_cpu=True, report_to="none", **flags)


def test_a_technique_may_reach_little_where_the_flag_says_so(tmp_path):
    net, args = small(tmp_path, prune_sparsity=0.5)
    with pytest.raises(MatchError, match=r"prune: covers only 11\.1 %"):
        EffTrainer(net, args)
    (parsed,) = HfArgumentParser(EffFlags).parse_args_into_dataclasses(
        ["--prune_sparsity", "0.5", "--eff_allow_partial", "true"]
    )
    assert parsed.recipe.allow_partial
    assert take_flags(["--eff-allow-partial", "--lr", "1"]) == ({"eff_allow_partial": "true"}, ["--lr", "1"])
    net, args = small(tmp_path, prune_sparsity=0.5, eff_allow_partial=True)
    assert EffTrainer(net, args).session.coverage["prune"].within == 128
    net, args = small(tmp_path)
    callbacks = [Pruning(sparsity=0.5), EffCallback({"allow_partial": True})]
    trainer = Trainer(net, args, callbacks=callbacks)
    assert callbacks[0].session.is_attached
    assert trainer.model is net


def build(make, folder, **settings):
    return EffTrainer(
        model_init=lambda: make.classifier(),
        args=make.arguments(folder, arguments_class=EffTrainingArguments, max_steps=2, **settings),
        train_dataset=make.examples(),
    )


@pytest.fixture(autouse=True)
def _trials_of_our_own(monkeypatch):
    monkeypatch.setattr("transformers.integrations.hp_params", lambda trial: trial.params)


def search(trainer, trials):
    """Train as `hyperparameter_search` does, and return what each trial left of the receipt."""
    trainer.hp_search_backend, trainer.hp_name = HPSearchBackend.OPTUNA, None
    trainer.hp_space = lambda trial: trial.params
    for number, params in enumerate(trials):
        trainer.train(trial=SimpleNamespace(number=number, params=params))
        yield trainer.session.receipt()
        trainer.model_wrapped, trainer.model = release_memory(trainer.model_wrapped, trainer.model)
        trainer.accelerator.clear()


def test_each_trial_runs_with_its_own_flags(make, tmp_path):
    trainer = build(make, tmp_path, prune_sparsity=0.8, qat_scheme="int8")
    found = list(search(trainer, [{"prune_sparsity": 0.5}, {"prune_sparsity": 0.25, "learning_rate": 1e-3}]))
    assert [receipt["techniques"]["prune"]["sparsity"] for receipt in found] == pytest.approx([0.5, 0.25], abs=2e-3)
    assert [receipt["steps"]["applied"] for receipt in found] == [2, 2]
    assert all("qat" in receipt["techniques"] for receipt in found)
    assert all((tmp_path / f"run-{number}" / "eff_receipt.json").is_file() for number in range(2))


def test_each_trials_accelerator_unscales_once(make, tmp_path):
    trainer = build(make, tmp_path, fp16=True, loss_scale_kind="dynamic")
    found = list(search(trainer, [{}, {}]))
    assert [receipt["techniques"]["loss_scale"]["steps"] for receipt in found] == [2, 2]


def test_a_flag_that_changes_after_construction_counts(make, tmp_path):
    settings = {"trainer_class": EffTrainer, "arguments_class": EffTrainingArguments}
    trainer = make.trainer(
        tmp_path, prune_sparsity=0.8, callbacks=[QuantizationAwareTraining(scheme="int8")], **settings
    )
    trainer.args.prune_sparsity = 0.5
    trainer.train()
    assert list(trainer.session.recipe) == ["prune", "qat"]
    assert trainer.session.receipt()["techniques"]["prune"]["sparsity"] == pytest.approx(0.5, abs=2e-3)
    plain = make.trainer(tmp_path, **settings)
    plain.args.prune_sparsity = 0.5
    with pytest.raises(ConfigError, match=r"applied prune.*changed after"):
        plain.train()


def test_a_session_is_the_trainers_after_others_joined(make, tmp_path):
    callback = QuantizationAwareTraining(scheme="int8")
    trainer = make.trainer(tmp_path, trainer_class=EffTrainer, callbacks=[callback])
    trainer.add_callback(Pruning(sparsity=0.5))
    assert attach(trainer, {"average": {"kind": "ema"}}) is trainer.session is callback.session
