"""What the Hugging Face Trainer saves: plain models, soups, model cards; and scripts that nobody edits."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainerCallback,
    ViTConfig,
    ViTForImageClassification,
)

from hf_eff import EffCallback, ModelSoup, Pruning, attach
from shared_core.checkpoint_formats.plain import add_section
from shared_core.cli.loading import load_weights
from shared_core.errors import CheckpointError, ReceiptError
from shared_core.soup import uniform_soup

PRUNE = {"sparsity": 0.5, "begin": 1, "end": 4, "every": 1}
QAT = {"scheme": "int8", "begin": 2}


class SaveAt(TrainerCallback):
    """A user's own save in the middle of training."""

    def __init__(self, step, folder):
        self.step, self.folder, self.logits = step, folder, None

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.step:
            self.trainer.save_model(self.folder)


def load_plain(folder):
    model, info = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    return model


def test_every_saved_model_is_plain_and_only_the_users_own_is_baked(make, tmp_path):
    saver = SaveAt(5, str(tmp_path / "mid"))
    trainer = make.trainer(tmp_path / "run", save_strategy="steps", save_steps=5, callbacks=[saver])
    saver.trainer = trainer
    attach(trainer, {"prune": PRUNE, "qat": QAT})
    trainer.train()
    trainer.save_model(str(tmp_path / "end"))
    middle, latent = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "mid", tmp_path / "run" / "checkpoint-5")
    )
    assert {"config.json", "model.safetensors", "training_args.bin"} <= {
        file.name for file in (tmp_path / "mid").iterdir()
    }
    name = "bert.encoder.layer.0.output.dense.weight"
    codes = middle[name] / (middle[name].abs().amax(1, keepdim=True) / 127)
    assert torch.allclose(codes, codes.round(), atol=1e-3)
    assert not torch.equal(middle[name], latent[name])
    assert torch.equal(middle[name] == 0, (middle[name] == 0) | (latent[name] == 0))
    for folder in (tmp_path / "mid", tmp_path / "end", tmp_path / "run" / "checkpoint-5"):
        load_plain(folder)
    saved, batch = load_plain(tmp_path / "end").eval(), make.examples(4)
    inputs = {key: torch.stack([row[key] for row in batch]) for key in ("input_ids", "attention_mask")}
    assert torch.equal(saved(**inputs).logits, trainer.model.eval()(**inputs).logits)


@pytest.mark.parametrize("shard", ["5GB", "5KB"])
def test_a_uniform_soup_is_the_mean_of_the_runs_checkpoints(make, tmp_path, shard, monkeypatch):
    (tmp_path / "checkpoint-99").mkdir()  # of an older run in the same folder
    trainer = make.trainer(tmp_path, save_strategy="steps", save_steps=2, callbacks=[ModelSoup(kind="uniform")])
    save = trainer.model.save_pretrained
    monkeypatch.setattr(trainer.model, "save_pretrained", lambda *a, **k: save(*a, **k, max_shard_size=shard))
    trainer.train()
    assert (tmp_path / "checkpoint-2" / "model.safetensors.index.json").exists() == (shard == "5KB")
    expected = uniform_soup([tmp_path / f"checkpoint-{step}" for step in (2, 4, 6, 8)])
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, expected[name])


def test_a_greedy_soup_is_never_worse_and_leaves_no_trace_in_the_log(make, tmp_path):
    trainer = make.trainer(
        tmp_path, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2, max_steps=16,
        callbacks=[ModelSoup(kind="greedy", metric="eval_loss")],
    )  # fmt: skip
    trainer.train()
    evaluations = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(evaluations) == 8
    assert trainer.evaluate()["eval_loss"] <= min(evaluations) + 1e-6
    report = json.loads((tmp_path / "eff_receipt.json").read_text())["techniques"]["soup"]
    assert report["candidates"] == 8
    assert report["best_single"] == pytest.approx(min(evaluations), abs=1e-6)


def test_calibration_disturbs_neither_random_numbers_nor_data(make, tmp_path):
    trainer = make.trainer(tmp_path)
    session = attach(trainer, {"prune": PRUNE})
    services = session._services
    gradient_state = trainer.accelerator.gradient_state  # one for the process
    references = list(gradient_state.dataloader_references)
    before, loaders = torch.get_rng_state(), list(trainer.accelerator._dataloaders)
    weights = [value.clone() for value in trainer.model.state_dict().values()]
    services.calibrate(2)
    assert torch.equal(before, torch.get_rng_state())
    assert trainer.accelerator._dataloaders == loaders
    assert gradient_state.dataloader_references == references
    assert all(map(torch.equal, weights, trainer.model.state_dict().values()))


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from conftest import make_examples, make_trainer
trainer = make_trainer(sys.argv[2])
class Own(type(trainer)):
    def train(self, *args, **kwargs):
        print("own train", flush=True)
        return super().train(*args, **kwargs)
trainer.__class__ = Own
trainer.train()
trainer.train()
weight = trainer.model.bert.encoder.layer[0].output.dense.weight
print("zeros", float((weight == 0).float().mean()))
"""


class Pairs(Trainer):
    """Batches that only its own loss can read."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        first, second = (model(input_ids=inputs[name]).logits for name in ("left", "right"))
        return (first - second).square().mean()


@pytest.mark.parametrize(
    "recipe",
    [
        {"qat": {"scheme": "int8"}, "average": {"kind": "ema"}},
        {"low_rank": {"rank": 2, "decomposition": "whitened", "min_size": 0}},
    ],
    ids=lambda recipe: next(iter(recipe)),
)
def test_calibration_runs_batches_as_the_subclass_does(make, tmp_path, recipe):
    data = [{"left": row["input_ids"], "right": row["input_ids"].flip(0)} for row in make.examples()]
    callback = EffCallback(recipe)
    make.trainer(
        tmp_path, trainer_class=Pairs, data=data, callbacks=[callback], remove_unused_columns=False, max_steps=2
    ).train()
    assert callback.session.receipt()["steps"]["applied"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("imported_first", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_an_unedited_script_gets_the_recipe(tmp_path, imported_first):
    (tmp_path / "script.py").write_text(SCRIPT)
    here = str(__file__).rsplit("/", 1)[0]
    code = f"""
import runpy, sys
{"import transformers.trainer" if imported_first else ""}
from shared_core import Recipe
from hf_eff.front_end import FRONT_END
FRONT_END.install(Recipe.from_dict({{"prune": {{"sparsity": 0.5, "scope": "local"}}}}))
assert {imported_first} or "transformers" not in sys.modules
assert not FRONT_END.used()
sys.argv = ["script.py", {here!r}, {str(tmp_path / "run")!r}]
runpy.run_path({str(tmp_path / "script.py")!r}, run_name="__main__")
assert FRONT_END.used()
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("own train") == 2
    assert "zeros 0.5" in done.stdout
    assert done.stdout.count("efftrain receipt") == 2


def vit():
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    return ViTForImageClassification(ViTConfig(image_size=4, patch_size=2, num_channels=1, **sizes))


def mixtral():
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    heads = {"num_key_value_heads": 2, "num_local_experts": 2}
    return MixtralForCausalLM(MixtralConfig(vocab_size=8, **sizes, **heads))


@pytest.mark.parametrize("build", [vit, mixtral])
def test_commands_load_a_folder_that_transformers_wrote_under_other_names(build, tmp_path):
    trained, fresh = build(), build()
    trained.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() != trained.state_dict().keys()
    load_weights(fresh, tmp_path, "eff quantize")
    assert all(torch.equal(value, fresh.state_dict()[name]) for name, value in trained.state_dict().items())
    save_file({**saved, "stranger": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"unexpected .*'stranger'"):
        load_weights(fresh, tmp_path, "eff quantize")


class PartTrainer(Trainer):
    """Saves a part of its model only, for another task."""

    def _save(self, output_dir=None, state_dict=None):
        self.model.bert.save_pretrained(output_dir)


def test_a_folder_with_a_part_of_the_model_is_counted(make, tmp_path, capsys):
    trainer = make.trainer(tmp_path, trainer_class=PartTrainer, max_steps=2, callbacks=[Pruning(sparsity=0.5, end=1)])
    trainer.train()
    trainer.save_model(tmp_path / "part")
    weights = load_file(tmp_path / "part" / "model.safetensors")
    assert "encoder.layer.0.output.dense.weight" in weights
    assert "not checked against the receipt" not in capsys.readouterr().out
    with torch.no_grad():
        trainer.model.bert.encoder.layer[0].output.dense.weight.fill_(1.0)
    with pytest.raises(ReceiptError, match=r"part: .*prune: bert\.encoder\.layer\.0\.output\.dense\.weight"):
        trainer.save_model(tmp_path / "part")


OWN = "---\nlicense: mit\n---\n\n# Mine\n\nwritten by hand\n"


class Writer(Trainer):
    """A trainer with a card of its own, as TRL's have."""

    def create_model_card(self, text=OWN):
        with open(f"{self.args.output_dir}/README.md", "w") as file:
            file.write(text)


def test_the_card_tells_what_was_asked_and_what_happened(make, tmp_path):
    trainer = make.trainer(tmp_path, max_steps=2, callbacks=[Pruning(sparsity=0.5, begin=0.0, end=1.0)])
    trainer.create_model_card(model_name="before")
    assert "Efficient training" not in (tmp_path / "README.md").read_text()  # nothing has happened yet
    trainer.train()
    for _ in range(2):
        trainer.create_model_card(model_name="mine")
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("---\n")
    assert "### Framework versions" in text.split("## Efficient training")[0]
    assert text.count("## Efficient training") == 1
    assert "| prune | sparsity | 0.5 |" in text
    assert "Pruned 50.0 % of" in text


def test_a_model_saved_over_one_of_another_technique_leaves_none_of_its_ranges(make, tmp_path):
    for recipe in ({"qat": {"scheme": "int8"}}, {"prune": {"sparsity": 0.5, "end": 1.0}}):
        trainer = make.trainer(tmp_path / "run", max_steps=2, callbacks=[EffCallback(recipe)])
        trainer.train()
        trainer.save_model()
        assert (tmp_path / "run" / "eff_deployment.json").exists() == ("qat" in recipe)
        assert ("eff_deployment.json" in (tmp_path / "run" / "README.md").read_text()) == ("qat" in recipe)


def test_a_saved_model_has_a_card_that_says_how_it_is_loaded(make, tmp_path):
    trainer = make.trainer(tmp_path / "run", max_steps=2, callbacks=[EffCallback({"qat": {"scheme": "int8"}})])
    trainer.save_model(str(tmp_path / "before"))
    assert not (tmp_path / "before" / "README.md").exists()  # nothing has happened yet
    trainer.train()
    saved = tmp_path / "saved"
    for _ in range(2):
        trainer.save_model(str(saved))
    text = (saved / "README.md").read_text()
    assert text.count("## Efficient training") == 1
    assert "| qat |" in text
    assert "It loads as it would without efftrain: `from_pretrained`" in text
    assert type(trainer.model).from_pretrained(saved).config.num_labels == trainer.model.config.num_labels
    assert (saved / "eff_deployment.json").is_file()
    assert "`eff export FOLDER --out model.onnx`" in text
    (saved / "README.md").write_text(OWN)
    trainer.save_model(str(saved))
    assert (saved / "README.md").read_text().startswith(OWN.rstrip())
    assert "It loads as" in (saved / "README.md").read_text()


def test_a_structure_of_its_own_is_told(make, tmp_path):
    trainer = make.trainer(tmp_path, max_steps=2, callbacks=[EffCallback({"low_rank": {"rank": "2", "min_size": 0}})])
    trainer.train()
    trainer.save_model()
    text = (tmp_path / "README.md").read_text()
    assert "With `low_rank`" in text
    assert "shared_core.low_rank.load" in text
    assert "as it would without" not in text


def test_a_subclass_keeps_its_text(make, tmp_path):
    trainer = make.trainer(tmp_path, trainer_class=Writer, max_steps=1, callbacks=[Pruning(sparsity=0.5)])
    trainer.train()
    trainer.create_model_card(OWN)
    text = (tmp_path / "README.md").read_text()
    assert text.startswith(OWN.rstrip())
    assert text.count("## Efficient training") == 1


def test_a_section_takes_the_place_of_an_earlier_one_and_of_nothing_else(tmp_path):
    card = tmp_path / "README.md"
    card.write_text(OWN)
    add_section(card, "## Efficient training\n\none")
    card.write_text(card.read_text() + "\n## More\n\nby hand, later\n")
    add_section(card, "## Efficient training\n\ntwo")
    text = card.read_text()
    assert text.startswith(OWN.rstrip())
    assert "\n\none" not in text
    assert "by hand, later" in text
    assert text.endswith("## Efficient training\n\ntwo\n<!-- efftrain: end -->\n")
