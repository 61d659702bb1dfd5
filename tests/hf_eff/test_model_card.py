"""The model card of a run with techniques: the trainer's own, and a section of ours at its end."""

import json

from transformers import Trainer

from hf_eff import EffCallback, Pruning
from shared_core.checkpoint_formats.plain import add_section

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
    told = json.loads((tmp_path / "eff_receipt.json").read_text())
    pruned = told["techniques"]["prune"]["pruned"]
    assert f"numel {told['techniques']['prune']['numel']:,}, pruned {pruned:,}, sparsity" in text


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
    assert "With `low_rank`, whose layers the checkpoint holds in two: load the weights with" in text
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
