"""Whatever a recipe, a flag or a file of options says: two steps run, or one error of ours tells what is wrong."""

import contextlib
import copy
import importlib
import itertools
import json
import re
import sys

import hypothesis.core
import pytest
import yaml
from hostile_recipes import (
    OPTIONS,
    TEACHER,
    check_told,
    command_line,
    commands,
    flag_lines,
    no_hang,
    recipes,
    two_steps,
)
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from torch import nn

from shared_core.engine.recipe import Recipe
from shared_core.errors import ConfigError, EffError, TrainingError
from shared_core.files.json_yaml import parse_yaml

LONG = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Options name folders to write."""
    monkeypatch.chdir(tmp_path)


def often(quick, long=300):
    """A test's number of examples in a quick and in a long run; `--hypothesis-seed=N` draws others than usual."""
    return pytest.mark.parametrize("count", [quick, pytest.param(long, marks=LONG)])


def for_each(strategy, count, tried):
    """Run `tried` on so many examples; it may only fail with an error that tells what is wrong."""

    def one(example):
        with no_hang():
            try:
                tried(example)
            except EffError as error:
                check_told(error)

    options = hypothesis.settings(
        max_examples=count,
        deadline=None,
        derandomize=hypothesis.core.global_force_seed is None,
        suppress_health_check=HealthCheck,
    )
    options(given(strategy)(one))()


@pytest.mark.slow
@often(120, 1_500)
def test_a_fuzzed_recipe_trains_or_is_refused(count):
    def tried(values):
        recipe = Recipe.from_dict(values)
        if not isinstance(recipe["distill"].teacher if "distill" in recipe else None, nn.Module):
            assert Recipe.from_dict(recipe.to_dict()) == recipe
        two_steps(recipe)

    for_each(recipes, count, tried)


@often(80)
def test_command_lines_of_eff_run(count):
    from shared_core.front_ends.flags import recipe_of, take_flags

    for_each(flag_lines, count, lambda line: recipe_of(take_flags(line)[0]))


@often(60)
def test_command_lines_of_hugging_face_scripts(count, capsys):
    from transformers import HfArgumentParser

    from hf_eff.training_args import EffFlags

    parser = HfArgumentParser(EffFlags)

    def tried(line):
        try:
            parser.parse_args_into_dataclasses(line)
        except SystemExit as end:  # argparse has told which argument and why
            if end.code not in (0, 2):
                raise
        except ValueError as error:
            if "not used by the HfArgumentParser" not in str(error):
                raise
        capsys.readouterr()

    for_each(flag_lines, count, tried)


CALLBACKS = {
    "prune": "Pruning", "qat": "QuantizationAwareTraining", "distill": "Distillation", "cluster": "WeightClustering",
    "average": "WeightAverage", "soup": "ModelSoup", "dp": "DifferentialPrivacy", "low_rank": "LowRank",
}  # fmt: skip


@often(30)
@pytest.mark.parametrize("namespace", ["pytorch_lightning", "lightning.pytorch"])
def test_command_lines_of_lightning(namespace, count, capsys):
    import jsonargparse

    callback = importlib.import_module(namespace).Callback
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--callbacks", type=list[callback] | None)

    def tried(given):
        key, options = given
        words = [word.removeprefix(f"--{key}_") for word in command_line({key: options})]
        flags = [f"--callbacks.{name}={value}" for name, value in zip(words[::2], words[1::2], strict=True)]
        try:
            found = parser.parse_args([f"--callbacks+=lightning_eff.{CALLBACKS[key]}", *flags])
            parser.instantiate_classes(found)
        except jsonargparse.ArgumentError:
            pass  # it names argument, value and type
        except ValueError as error:  # jsonargparse's, with the text of ours in it
            check_told(EffError(error))

    pairs = st.sampled_from(sorted(CALLBACKS)).flatmap(lambda key: st.tuples(st.just(key), some_of(key)))
    for_each(pairs, count, tried)


def some_of(key):
    return OPTIONS[False][key] | OPTIONS[True][key]


@pytest.mark.slow
@often(40)
def test_a_fuzzed_command_line_ends_in_one_line(count, tmp_path, monkeypatch, capsys):
    from shared_core import cli

    def tried(line):
        if "--watch" in line:
            return  # it waits for a run
        monkeypatch.setattr(sys, "argv", ["eff", *line])
        with pytest.raises(SystemExit) as end:
            cli.main()
        told = capsys.readouterr().err
        assert end.value.code in (0, 1, 2)
        assert "Traceback" not in told
        assert end.value.code != 2 or re.search("rror|Usage", told)

    for_each(commands(cli.app, str(tmp_path)), count, tried)


PIECES = [
    *"[]{}:,-?&*!|>'\"#%@`\n \t", "&a ", "*a", "<<: ", "!!python/object/apply:os.mkdir [ran]", "!!int ", "!!binary ",
    "!!timestamp ", "!!set ", "!!omap ", "!!float ", "2024-13-45", "0x_", "0b_", "1:99:99", "prune", "sparsity: 0.5",
    "---\n", "...\n", "\ufeff", "\x00", "\u2028", "\x85", "? ", "~", ".inf", ".nan", "0o8", "- - -", "\n  ",
]  # fmt: skip


def written(values):
    """A recipe as YAML or JSON, if it can be written."""
    texts = []
    for write in (yaml.safe_dump, json.dumps):
        with contextlib.suppress(yaml.YAMLError, TypeError, ValueError):
            texts.append(write(values))
    return st.sampled_from([*texts, "{}"])


pieces = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
whole = recipes.flatmap(written)
broken = st.tuples(whole, st.integers(0, 200), pieces).map(lambda t: t[0][: t[1]] + t[2] + t[0][t[1] + 1 :])
begun = st.tuples(st.sampled_from(["", "{", "prune:\n  sparsity: "]), pieces).map("".join)


@often(80)
@pytest.mark.parametrize("read", [Recipe.from_yaml, Recipe.from_json])
def test_texts(read, count, tmp_path):
    for_each(whole | broken | begun, count, read)
    assert not list(tmp_path.iterdir())


LAUGHS = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{now}: &{now} [{','.join([f'*{before}'] * 9)}]\n" for before, now in itertools.pairwise("abcdefghijkl")
)


MERGES = LAUGHS.replace("[1,1,1,1,1,1,1,1,1]", "{b: 1}").replace("[", "{<<: [").replace("]", "]}")


@pytest.mark.parametrize(("text", "match"), [
    (LAUGHS, "it has more than 1,000,000 values"),
    (MERGES, "it has more than 1,000,000 values"),
    ("a: &a [*a]", "contains itself"),
    ("a: " + "[" * 1500, "nested too deeply"),
    ("{" + '"a": {' * 100_000, "nested too deeply"),
    ("prune: {sparsity: 0.5}\nprune: {sparsity: 0.6}", "'prune' is given twice"),
    ('{"prune": {"sparsity": 0.5, "sparsity": 0.6}}', "'sparsity' is given twice"),
    ("prune: {sparsity: 2024-13-45}", "month must be in"),
    ("prune: {sparsity: 0x_}", "valid YAML"),
    ("no\x00file", "cannot read"),
])  # fmt: skip
def test_texts_that_once_broke_the_reader(text, match, tmp_path):
    read = Recipe.from_json if text.startswith("{") else Recipe.from_yaml
    with no_hang(), pytest.raises(ConfigError, match=match):
        read(text)
    assert not list(tmp_path.iterdir())


def test_aliases_are_read():
    read = parse_yaml("a: &a [last]\nb: *a\nc: {<<: {x: 1}, y: 2}")
    assert read == {"a": ["last"], "b": ["last"], "c": {"x": 1, "y": 2}}


@pytest.mark.parametrize(
    ("recipe", "match"),
    [
        ({"prune": {"sparsity": 0.5, "begin": 10**400}}, r"begin must be a step \(500\)"),
        ({"prune": {"sparsity": "9" * 5000}}, r"sparsity must be a finite number, got '9+ \[…\]"),
        ({"prune": {"\ud800": 1}}, r"prune\.\\ud800 is not an option"),
        ({"lora": {"rank": 2**63}}, r"rank must be .* 65536"),  # which torch cannot make
    ],
)
def test_values_that_once_broke_the_message_or_torch(recipe, match):
    with pytest.raises(ConfigError, match=match) as caught:
        Recipe.from_dict(recipe)
    check_told(caught.value)


def test_a_teacher_that_fails_on_the_inputs_of_a_part_of_the_student_is_told():
    with pytest.raises(TrainingError, match=r"teacher must compute from the student's inputs, of shapes \[\(4, 32\)\]"):
        two_steps(Recipe.from_dict({"distill": {"teacher": TEACHER, "student": "head"}}))


@pytest.mark.parametrize("recipe", [
    {"distill": {"teacher": "ema"}, "lora": {"rank": 8, "base": "nf4"}},
    {"low_rank": {"rank": 10**500, "min_size": 1, "force": True}},
    {"qat": {"scheme": "binary"}, "checkpointing": {"policy": "selective"}},
], ids=" ".join)  # fmt: skip
def test_recipes_that_once_failed_train(recipe):
    two_steps(Recipe.from_dict(recipe))


def test_layers_of_a_teacher_in_codes_are_not_copied():
    distill = {"teacher": copy.deepcopy(TEACHER), "teacher_dtype": "int8", "init_layers": "first"}
    with pytest.raises(ConfigError, match="float weights in both"):
        two_steps(Recipe.from_dict({"distill": distill}))
