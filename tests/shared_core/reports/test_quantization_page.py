"""The page of `eff quantize`: every section, measured or naming its option, and the plans and attacks behind it."""

import copy
import json
import re
import sys

import pytest
from commands import eff, user_module
from quantization_digits import accuracy, batches, data, trained
from reports import part, report_of
from safetensors.torch import load_file, save_file
from torch import nn

from shared_core.checkpoint_formats.plain import read_deployment
from shared_core.errors import MissingExtraError
from shared_core.quantization import BitPlan, QatConfig, apply_ranges, quantize, quantize_with_report
from shared_core.quantization.post_training.adversarial import adversarial_accuracy

TASK = """
import quantization_digits as digits

def cnn():
    return digits.make("cnn", 0)

def cnn_and_inputs():
    return cnn(), digits.data(0)[1][0][:16]

def calibration():
    return digits.batches()

def accuracy(model):
    return digits.accuracy(model) / 100

def wrong(model):
    return 1.2 - accuracy(model)

def images():
    x, y = digits.data(0)[1]
    return [(x[:100], y[:100])]
"""
HEADINGS = [
    "What was asked", "Quality", "Size", "Error of the outputs", "Error of the weights", "Sensitivity", "Robustness",
    "Latency",
]  # fmt: skip


@pytest.fixture
def run(tmp_path, monkeypatch):
    user_module(tmp_path, monkeypatch, "report_task", TASK)
    save_file(trained("cnn").state_dict(), tmp_path / "trained.safetensors")

    def invoke(model, *args):
        line = ["quantize", f"report_task:{model}", "--weights", "trained.safetensors", *args]
        return eff(*line)

    return invoke


def told(path):
    return json.loads((path / "eff_quantization.json").read_text())


CALIBRATED = ("--calibration", "report_task:calibration", "--out")
JUDGED = ("--eval", "report_task:accuracy", *CALIBRATED)


@pytest.mark.slow
def test_a_page_of_everything(run, tmp_path):
    run("cnn", *CALIBRATED, "qat")
    result = run(
        "cnn_and_inputs", *JUDGED, "small", "--report", "small/page.html", "--qat", "qat", "--latency",
        "--sensitivity", "kl", "--set", "weight_bits=4", "--set", "skip=6", "--equalize", "--accept", "0.25",
        "--attack", "report_task:images", "--attack-eps", "8/255,0.1", "--attack-steps", "5",
    )  # fmt: skip
    assert result.exit_code == 0
    assert "Wrote small/page.html and small/page.md" in result.stdout
    values, text = told(tmp_path / "small"), (tmp_path / "small" / "page.md").read_text()
    page = (tmp_path / "small" / "page.html").read_text()
    assert re.findall(r"^## (.*)", text, flags=re.M) == re.findall("<h2>(.*)</h2>", page) == [*HEADINGS, "Notes"]
    assert page.count("<img ") == text.count("*Plot: ") == 4
    assert "Not measured" not in text

    asked = part(text, "What was asked")
    for row in ("| model | report_task:cnn_and_inputs |", "| set | weight_bits=4, skip=6 |", "| equalize | true |",
                "| qat | qat |", "| attack-eps | 8/255,0.1 |", "| weight_bits | 4 |", "| range | mse |"):  # fmt: skip
        assert row in asked

    quality = {name: accuracy(model) / 100 for name, model in {
        "float": trained("cnn"),
        "quantized": quantize_with_report(
            trained("cnn"), {"scheme": "int8", "weight_bits": 4, "skip": ["6"]}, batches(), equalize=True)[0],
        "qat": quantize(trained("cnn"), "int8", batches()),
    }.items()}  # fmt: skip
    assert values["quality"] == quality
    assert f"| in training (QAT) | {quality['qat']:.6g} |" in part(text, "Quality")
    for verdict in values["verdicts"].values():
        assert verdict["judgement"] == "acceptable"
    assert "unacceptable above 25.0000%" in text

    size = part(text, "Size")
    assert values["layer_bytes"] == {"0": [576, 72 + 64], "3": [9216, 1152 + 64]}
    assert "| 3 | Conv2d | 2,304 | 4 | static | 9,216 | 1,216 | 7.58 |" in size
    assert f"{values['bytes']['quantized']:,} bytes with codes" in size
    for entry in values["layers"]:
        assert f"| {entry['name']} | {round(entry['sqnr_db'], 2):.6g} |" in part(text, "Error of the weights")
        assert f"| {entry['name']} | {round(entry['output_sqnr_db'], 2):.6g} |" in part(text, "Error of the outputs")
    assert f"{values['output_sqnr_db']:.1f} dB for the whole model's output" in part(text, "Error of the outputs")
    assert set(values["sensitivity"]["layers"]) == {"0", "3"}
    assert "| layer | bits | kl |" in part(text, "Sensitivity")
    for form in ("float32", "bfloat16", "int8 reference", "torchao"):
        assert f"| {form} | " in part(text, "Latency")
    assert "chains of layers equalized" in part(text, "Notes")
    again = report_of(tmp_path / "small")
    assert part(again, "Error of the weights") == part(text, "Error of the weights")
    sizes = f"{values['bytes']['float']:,} | {values['bytes']['quantized']:,}"
    assert f"| bytes, float and codes | {sizes} |" in part(again, "Before and after")


@pytest.mark.slow
def test_attacks_are_made_on_each_model_and_carried_over_from_the_float_one(run, tmp_path):
    run("cnn", *CALIBRATED, "qat")
    result = run(
        "cnn", *CALIBRATED, "small", "--report", "page.html", "--qat", "qat", "--attack", "report_task:images",
        "--attack-eps", "0.1,0.05", "--attack-steps", "4",
    )  # fmt: skip
    rows = told(tmp_path / "small")["attacks"]["rows"]
    assert [(row["model"], row["made_on"]) for row in rows if row["attack"] == "pgd" and row["eps"] == 0.05] == [
        ("float", "itself"), ("quantized", "itself"), ("quantized", "float"), ("qat", "itself"), ("qat", "float"),
    ]  # fmt: skip
    (x, y), model = data(0)[1], quantize(trained("cnn"), "int8", batches())
    for source, name in ((None, "itself"), (trained("cnn"), "float")):
        expected = adversarial_accuracy(model, [(x[:100], y[:100])], 0.1, steps=4, low=0, high=1, source=source)
        row = next(row for row in rows if (row["attack"], row["eps"], row["model"], row["made_on"])
                   == ("pgd", 0.1, "quantized", name))  # fmt: skip
        assert (row["clean"], row["adversarial"]) == (expected.clean, expected.adversarial)
        assert row["adversarial"] < row["clean"]
    worst = min(row["adversarial"] for row in rows if (row["eps"], row["model"]) == (0.1, "qat"))
    assert f"(QAT): {rows[-1]['clean']:.4f} → {worst:.4f}" in result.stdout
    text = part((tmp_path / "page.md").read_text(), "Robustness")
    assert text.count("the float model, transferred") == 8
    assert "within bounds 0 to 1; PGD takes 4 steps" in text
    assert "Not measured; --eval" in (tmp_path / "page.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("evaluate", "mode"), [("accuracy", "max"), ("wrong", "min")])
def test_a_plan_by_quality_quantizes_what_it_says(run, tmp_path, evaluate, mode):
    result = run(
        "cnn", *CALIBRATED, "small", "--eval", f"report_task:{evaluate}", "--mode", mode, "--report", "page.html",
        "--set", "weight_bits=2", "--largest-loss", "0.02", "--sensitivity", "kl", "--all-layers",
    )  # fmt: skip
    values, plan = told(tmp_path / "small"), BitPlan.from_yaml(tmp_path / "small" / "plan.yaml")
    codes = len(plan.quantized)
    assert 0 < codes < 3
    assert set(values["layer_bytes"]) == set(plan.quantized)
    assert values["plan"]["bits"] == plan.bits
    assert f"The plan quantizes {codes} of 3 layers" in result.stdout
    # the quality of the plan's point is that of the model that was written
    curve = values["plan"]["curves"]["quantized"]
    assert curve[-1]["quality"] == values["quality"]["quantized"]
    assert curve[-1]["quantized"] == codes
    assert abs(values["quality"]["quantized"] - values["quality"]["float"]) <= 0.02
    model = copy.deepcopy(trained("cnn"))
    model.load_state_dict(load_file(tmp_path / "small" / "model.safetensors"))
    found = accuracy(apply_ranges(model, read_deployment(tmp_path / "small")["qat"]["ranges"])) / 100
    assert values["quality"]["quantized"] == pytest.approx(found if mode == "max" else 1.2 - found)
    assert set(QatConfig.from_dict(plan.qat_options()).skip) == plan.bits.keys() - set(plan.quantized)
    text = part((tmp_path / "page.md").read_text(), "Sensitivity")
    assert f"The plan quantizes {codes} of 3 layers" in text
    for point in curve:
        assert f"| {point['quantized']} | {point['average_bits']:.6g} | {point['quality']:.6g} |" in text


@pytest.mark.slow
def test_layers_by_rule_stay_in_float_unless_told(run, tmp_path):
    run("cnn", *JUDGED, "small", "--largest-loss", "1")
    values = told(tmp_path / "small")
    assert values["plan"]["kept"] == {"0": "the first layer", "6": "the last layer"}
    assert set(values["layer_bytes"]) == {"3"}
    assert values["sensitivity"]["metric"] == "rmse"


def test_what_was_not_measured_names_its_option(run, tmp_path):
    result = run("cnn", "--out", "small", "--scheme", "int8_weight", "--report", "page.html")
    assert result.exit_code == 0
    text = (tmp_path / "page.md").read_text()
    for heading, option in (("Quality", "--eval"), ("Sensitivity", "--sensitivity"), ("Robustness", "--attack"),
                            ("Latency", "--latency")):  # fmt: skip
        assert re.search(rf"Not measured; {option}\b", part(text, heading))
    assert "attack-eps" not in text


@pytest.mark.slow
def test_the_same_run_gives_the_same_page(run, tmp_path):
    for name in ("first", "second"):
        run("cnn", *JUDGED, name, "--report", f"{name}.html", "--sensitivity", "rmse", "--attack", "report_task:images",
            "--attack-steps", "2")  # fmt: skip
    assert (tmp_path / "first.html").read_bytes() == (tmp_path / "second.html").read_bytes()
    assert (tmp_path / "first.md").read_bytes() == (tmp_path / "second.md").read_bytes()


@pytest.mark.slow
def test_names_of_layers_are_escaped_and_many_layers_are_cut(run, tmp_path, monkeypatch):
    import report_task

    def many():
        net = nn.Sequential()
        for index in range(70):
            net.add_module(f"<i>{index}|*", nn.Linear(4, 4))
        return net

    monkeypatch.setattr(report_task, "many", many, raising=False)
    save_file(many().state_dict(), tmp_path / "trained.safetensors")
    run("many", "--out", "small", "--scheme", "int8_weight", "--report", "page.html")
    page, text = (tmp_path / "page.html").read_text(), (tmp_path / "page.md").read_text()
    assert "<i>" not in page
    assert "<td>&lt;i&gt;69|*</td>" in page
    assert r"| \<i\>69\|\* |" in text
    assert "the 60 lowest of 70" in text


def test_a_page_needs_matplotlib_before_any_work(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"eff quantize: --report: needs matplotlib.*efftrain\[plots\]"):
        run("cnn", "--out", "small", "--scheme", "int8_weight", "--report", "page.html")
    assert not (tmp_path / "small").exists()
