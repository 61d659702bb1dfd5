"""Chains over whole trainings of both trainers, by the command line, in processes of their own."""

import sys
from pathlib import Path

import pytest
import torch
import yaml
from chain_script import train_hf, train_lightning
from commands import told_by

from shared_core.runs.trained_model import count_parameters

SCRIPT = str(Path(__file__).resolve().parents[2] / "support" / "trainers" / "chain_script.py")


def chain(*arguments):
    return told_by("chain", *arguments)["stages"]


@pytest.mark.slow
def test_a_student_of_the_hugging_face_trainer(tmp_path):
    big = tmp_path / "big"
    train_hf(16, big)
    (row,) = chain(
        "--students", 8, "--teacher", big, "--distill_temperature", 3, "--out", tmp_path / "out", "--",
        sys.executable, SCRIPT, "hf", "{student}", "{out}", "--distill_alpha", 0.4,
    )  # fmt: skip
    assert row["teacher"] == str(big / "checkpoint-2")  # the trainer's best
    assert (row["model"], row["batches"]) == ("stage-1/checkpoint-2", 4)
    assert row["teacher_parameters"] == count_parameters(big / "checkpoint-4") > row["parameters"]
    assert row["metric"] == row["metrics"]["eval_loss"]
    distill = yaml.safe_load((tmp_path / "out" / "stage-1.yaml").read_text())["distill"]
    assert (distill["temperature"], distill["alpha"]) == (3.0, 0.4)


@pytest.mark.slow
def test_generations_of_lightning(tmp_path):
    before = tmp_path / "before"
    train_lightning(4, before)
    (row,) = chain(
        "--generations", 1, "--teacher", before, "--out", tmp_path / "out", "--",
        sys.executable, SCRIPT, "lightning", 4, "{out}", "--distill_student", "net",
    )  # fmt: skip
    (teacher,) = before.rglob("*.ckpt")
    assert (row["teacher"], row["batches"]) == (str(teacher), 6)
    assert row["parameters"] == row["teacher_parameters"] == 32 * 4 + 2 * 24 + 24 * 2 + 2
    assert 0 <= row["metrics"]["val_accuracy"] <= 1
    assert row["warnings"] == []
    written = torch.load(tmp_path / "out" / row["model"], weights_only=True)["state_dict"]
    taught_by = torch.load(teacher, weights_only=True)["state_dict"]
    # the same seed and data: only the teacher makes the difference
    assert not torch.equal(written["net.3.weight"], taught_by["net.3.weight"])
