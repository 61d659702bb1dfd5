"""Low rank in the Hugging Face Trainer: saved, loaded, calibrated."""

import json

import pytest
import torch
from commands import eff
from promise_drivers import difference, hf_trainer
from promise_table import NUM_STEPS, make_net, train_examples
from torch.utils.data import IterableDataset
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

from hf_eff import EffCallback, LowRank, attach
from shared_core.checkpoint_formats.plain import read_deployment
from shared_core.errors import CompatibilityError
from shared_core.low_rank import load

ENERGY = {"low_rank": {"rank": "energy:0.8"}}
IMAGE = torch.ones(1, 1, 8, 8)
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def test_what_is_saved_loads_in_a_plain_model(tmp_path):
    options = {"save_every": 4, "callbacks": [LowRank(**ENERGY["low_rank"])], "dropout": 0.3}
    trainer = hf_trainer({}, tmp_path, plugin=False, **options)
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    expected = trainer.model.eval()(IMAGE)["logits"]
    for folder in ("final", f"checkpoint-{NUM_STEPS}"):
        fresh = load(make_net(seed=9), tmp_path / folder).eval()
        assert torch.equal(fresh(IMAGE)["logits"], expected)
    assert not (tmp_path / "final" / "model.safetensors").exists()  # from_pretrained would draw the rest anew
    assert read_deployment(tmp_path / "final")["low_rank"]["layers"]["hidden"]["scheme"] == "linear"
    receipt = json.loads((tmp_path / "eff_receipt.json").read_text())
    assert not [note for note in receipt["notes"] if "not checked against the receipt" in note]
    told = receipt["techniques"]["low_rank"]
    numel = sum(parameter.numel() for parameter in trainer.model.parameters())
    assert told["parameters_after"] == numel < told["parameters_before"]
    trainer.train()  # trains on as it is
    assert trainer.model.hidden.rank == told["structure"]["hidden"]["rank"]


@pytest.mark.parametrize("inside", [False, True])
def test_a_model_of_which_adapters_alone_are_saved_is_refused(make, tmp_path, inside):
    from peft import LoraConfig, get_peft_model

    model, adapters = make.classifier(), LoraConfig(target_modules=["query"], r=2)
    if inside:
        model.add_adapter(adapters)
    else:
        model = get_peft_model(model, adapters)
    with pytest.raises(CompatibilityError, match=r"low_rank cannot be combined with a PEFT model"):
        make.trainer(tmp_path, model=model, callbacks=[LowRank(rank=2, min_size=0)])


def vit(seed=0):
    torch.manual_seed(seed)
    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=10, **SIZES))


def mixtral(seed=0):
    torch.manual_seed(seed)
    return MixtralForCausalLM(MixtralConfig(vocab_size=24, num_key_value_heads=2, num_local_experts=2, **SIZES))


@pytest.mark.parametrize("make", [vit, mixtral])
def test_a_model_that_transformers_saves_by_other_names_or_in_other_pieces_resumes_and_loads(make, tmp_path):
    words = torch.randint(24, (16, 6), generator=torch.Generator().manual_seed(0))
    images = [{"pixel_values": row["x"], "labels": row["labels"]} for row in train_examples()]
    data = images if make is vit else [{"input_ids": row, "labels": row} for row in words]

    def run(folder, resume=None):
        args = TrainingArguments(str(folder), max_steps=4, save_steps=2, use_cpu=True, report_to="none",
                                 per_device_train_batch_size=8, disable_tqdm=True, seed=1)  # fmt: skip
        callbacks = [LowRank(rank=3, min_size=0), EffCallback({"allow_partial": True})]  # of a mixture, too
        trainer = Trainer(make(), args, train_dataset=data, callbacks=callbacks)
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model(str(folder / "final"))
        return trainer.model

    whole = run(tmp_path / "whole")
    again = run(tmp_path / "again", str(tmp_path / "whole" / "checkpoint-2"))
    assert difference(dict(whole.state_dict()), dict(again.state_dict())) is None
    for folder in ("checkpoint-4", "final"):
        fresh = load(make(seed=4), tmp_path / "whole" / folder)
        assert difference(dict(whole.state_dict()), dict(fresh.state_dict())) is None


def test_the_command_factorizes_a_model_for_which_no_inputs_are_made_up(tmp_path):
    from transformers import PatchTSTConfig, PatchTSTModel

    sizes = {"d_model": 16, "ffn_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    PatchTSTModel(PatchTSTConfig(**sizes, context_length=8, patch_length=4)).save_pretrained(tmp_path / "model")
    arguments = ["low-rank", str(tmp_path / "model"), "--out", str(tmp_path / "small"), "--rank", "2"]
    result = eff(*arguments, "--min-size", "1", "--json")
    values = json.loads(result.stdout)
    assert len(values["layers"]) >= 6
    assert values["bytes"]["after"] < values["bytes"]["before"]
    assert "milliseconds" not in values


@pytest.mark.parametrize("once", [False, True])
def test_calibration_on_a_stream_that_it_may_use_up_is_noted(make, tmp_path, once):
    class Stream(IterableDataset):
        def __init__(self, rows):
            self.rows = iter(rows) if once else rows

        def __iter__(self):
            yield from self.rows

    trainer = make.trainer(tmp_path, max_steps=8)
    trainer.train_dataset = Stream(make.examples(48))
    options = {"rank": 4, "decomposition": "whitened", "calibration_batches": 3, "min_size": 0}
    session = attach(trainer, {"low_rank": options})
    trainer.train()
    assert any("uses up to 3 batches" in note for note in session.notes) is once
