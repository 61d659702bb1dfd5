"""The options of distillation: what each refuses at the start, and how flags give them."""

import pytest
import torch
from eff_kernels.distillation import DIVERGENCES
from torch import nn

from shared_core.distillation import DistillConfig
from shared_core.errors import ConfigError

NAN = float("nan")
A_TEACHER = "teacher must be a folder, a Hub name, a module, or several of them"
WITHOUT = "cannot be combined with teacher="
REFUSED = [
    ({"teacher": ""}, f"{A_TEACHER}, got ''"),
    ({"teacher": None}, A_TEACHER),
    ({"teacher": 3}, A_TEACHER),
    ({"teacher": nn.Linear}, A_TEACHER),
    ({"teacher": "ema, runs/a"}, "teacher must be .*cache:FOLDER"),
    ({"teacher": "mutual, runs/a"}, "teacher must be .*cache:FOLDER"),
    ({"teacher_weights": [1, 2]}, "each of .*1 teachers"),
    ({"teacher_dtype": "int3"}, "teacher_dtype must be"),
    ({"teacher": "ema", "teacher_dtype": "int8"}, f"teacher_dtype {WITHOUT}ema"),
    ({"temperature": 0.0}, "temperature must be in"),
    ({"temperature": NAN}, "temperature must be a finite number"),
    ({"temprature": 2.0}, "did you mean 'temperature'"),
    ({"teacher": "cache:x", "temperature_end": 3.0}, f"temperature_end {WITHOUT}cache"),
    ({"alpha": 1.5}, "alpha must be in"),
    ({"alpha": -0.1}, "alpha must be in"),
    ({"begin": -1}, "begin must be a step"),
    ({"end": 1.2}, "end must be a step"),
    ({"causal": "maybe"}, "causal must be true or false"),
    ({"divergence": "bernouli_kl"}, "bernoulli_kl"),
    ({"vocab_size": 0}, "vocab_size"),
    ({"hidden": ["2"]}, "student=teacher pairs"),
    ({"unlabeled_field": "labels"}, "unlabeled_field must be .*, got 'labels'"),
    *(({"init_layers": value}, "init_layers") for value in ("odd", "", "1;2", "1.5")),
    ({"chunked": True, "divergence": "hard_label"}, "divergence={}, {} or {}, got".format(*DIVERGENCES)),
    *(({"chunked": True, "teacher": teacher}, "chunked .*teacher=NAME, self or ema")
      for teacher in ("a, b", "cache:x")),
    ({"chunked": True, "confidence": 0.5}, "chunked .*confidence=0.0, got confidence=0.5"),
    ({"budget_mib": 1.0}, "budget_mib .*chunked"),
    ({"divergence": "logit_mse", "confidence": 0.5}, "confidence .*a divergence over classes"),
    *(({"teacher": "mutual", "peers": count}, "peers must be .*at least 2")
      for count in (1, "1", [], 2.5, True)),
    ({"peers": 3}, "peers .*teacher=mutual, got teacher=NAME"),
    ({"teacher": "mutual", "hidden": ["a=a"]}, "hidden .*teacher=NAME or self, got teacher=mutual"),
    ({"teacher": "mutual", "confidence": 0.5}, f"confidence {WITHOUT}mutual"),
    ({"teacher": "mutual", "teacher_weights": [1.0]}, f"teacher_weights {WITHOUT}mutual"),
    *(({"teacher": "mutual", "begin": at}, f"begin {WITHOUT}mutual") for at in (3, 0)),
    *(({"teacher": "mutual", "end": at}, f"end {WITHOUT}mutual") for at in (0.5, 1)),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_makes_no_sense_is_refused_at_start(options, message):
    with pytest.raises(ConfigError, match=message):
        DistillConfig.from_dict({"teacher": "runs/t", **options})


def test_the_teacher_is_the_switch():
    with pytest.raises(ConfigError, match=r"distill\.teacher must be given"):
        DistillConfig.from_dict({"alpha": 0.3})


def test_values_of_flags_and_files_are_converted(tmp_path):
    config = DistillConfig.from_dict({"teacher": tmp_path, "causal": "true", "end": "2ep", "student": "none"})
    assert (config.teacher, config.causal, config.student) == (str(tmp_path), True, None)
    assert DistillConfig.from_dict(config.to_dict()) == config
    assert DistillConfig(teacher=torch.nn.Linear(1, 1)).to_dict()["teacher"] == "<Linear>"
    # as flags give them: a number, or names
    assert DistillConfig(teacher="mutual", peers="3").drawn_peers == 2
    assert DistillConfig(teacher="mutual", peers="runs/a, runs/b").given_peers == ("runs/a", "runs/b")
