"""A loop of accelerate: what its methods mean for the techniques, what they save, and what is refused."""

import atexit
import json
import sys

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration
from commands import eff
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, default_data_collator, get_scheduler

from hf_eff import prepare
from hf_eff.accelerate_loop import AcceleratedLoop
from hf_eff.front_end import FRONT_END
from shared_core import Recipe, Session
from shared_core.engine.receipt import Receipt
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError, TrainingError
from shared_core.front_ends.flags import STEPS_VARIABLE
from shared_core.front_ends.loop_driver import _LOOPS

pytestmark = pytest.mark.matrix

PRUNE = {"prune": {"sparsity": 0.5, "end": 2}}
STEPS = 4


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """No state of accelerate, loops or `eff run` of another test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setenv(STEPS_VARIABLE, "")  # so that what `eff run` puts there goes with the test
    monkeypatch.delenv(STEPS_VARIABLE)
    monkeypatch.setattr(sys.modules["shared_core.cli.trainings"], "front_ends", lambda: [FRONT_END])
    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()
    yield
    FRONT_END.install(Recipe({}))
    for loop in _LOOPS:
        atexit.unregister(loop.at_exit)  # it would write a receipt where the tests were started
    _LOOPS.clear()
    AcceleratorState._reset_state(reset_partial_state=False)


class Loop:
    """What a script has after `prepare`."""

    def __init__(self, make, recipe, rate=0.01, **options):
        self.accelerator = Accelerator(cpu=True, **options)
        self.model = make.classifier()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate)
        self.schedule = get_scheduler("linear", self.optimizer, num_warmup_steps=0, num_training_steps=STEPS)
        loader = DataLoader(make.examples(), batch_size=8, collate_fn=default_data_collator)
        mixed = self.schedule, loader, self.model, "else", self.optimizer
        self.schedule, self.loader, self.model, other, self.optimizer = prepare(self.accelerator, *mixed, recipe=recipe)
        assert other == "else"
        self.model.train()

    @property
    def session(self) -> Session:
        return self.optimizer.eff_loop.session

    def steps(self, count=STEPS, factor=1.0, clips=True):
        for _, batch in zip(range(count), self.loader, strict=False):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(**batch).loss * factor)
                if clips and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
        return self


def zeros(weights):
    """The share of zeros in the linear layers of the encoder."""
    found = [value for name, value in weights.items() if "encoder" in name and value.dim() > 1]
    return sum(int((value == 0).sum()) for value in found) / sum(value.numel() for value in found)


@pytest.mark.parametrize("clips", [True, False])
def test_gradients_are_shown_once_a_step_unscaled_and_not_clipped(make, monkeypatch, clips):
    seen = []
    show = Session.before_step
    monkeypatch.setattr(
        Session,
        "before_step",
        lambda self: (seen.append(self.context.model.classifier.weight.grad.norm().item()), show(self)),
    )
    loop = Loop(make, {**PRUNE, "loss_scale": {"kind": "dynamic", "init_scale": 1024.0}}, rate=0.0)
    loop.steps(factor=100.0, clips=clips)
    batch = next(iter(loop.loader))
    plain = make.classifier()
    assert loop.session.step == len(seen) == STEPS
    torch.manual_seed(0)
    (plain(**batch).loss * 100).backward()
    assert 1.0 < seen[0] < 1024  # of the loss times 100, neither clipped to 1 nor a multiple of the scale


def test_a_skipped_step_moves_neither_session_nor_schedule(make):
    loop = Loop(make, {**PRUNE, "loss_scale": {"kind": "dynamic", "init_scale": 8.0}})
    rate = loop.schedule.get_last_lr()
    loop.steps(1, factor=float("inf"))
    assert (loop.session.step, loop.session.skipped) == (0, 1)
    assert loop.schedule.get_last_lr() == rate
    loop.steps(1)
    assert (loop.session.step, loop.session.skipped) == (1, 1)
    assert loop.schedule.get_last_lr() < rate


@pytest.mark.parametrize("recipe", [PRUNE, {"qat": {"scheme": "int8"}}, {"lora": {"rank": 2, "base": "none"}}], ids=str)
def test_what_is_saved_in_training_and_at_its_end_is_a_plain_model(make, tmp_path, recipe):
    loop = Loop(make, recipe).steps(2)
    loop.accelerator.save_model(loop.model, tmp_path / "model")
    loop.accelerator.unwrap_model(loop.model).save_pretrained(tmp_path / "early")
    assert not loop.session.is_finished
    early = AutoModelForSequenceClassification.from_pretrained(tmp_path / "early").state_dict()
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(early[name], saved[name]) for name in saved)
    loop.steps(2)
    state = loop.accelerator.get_state_dict(loop.model)
    assert list(state) == list(make.classifier().state_dict())
    loop.accelerator.unwrap_model(loop.model).save_pretrained(tmp_path / "end", state_dict=state)
    assert loop.session.is_finished
    if "prune" in recipe:
        assert zeros(loop.model.state_dict()) == pytest.approx(0.5, abs=0.05)
    assert Receipt.read(tmp_path / "end")["finished"]
    loop.accelerator.end_training()
    assert {type(module) for module in loop.model.modules()} == {type(module) for module in make.classifier().modules()}
    with pytest.raises(TrainingError, match=r"stepped after the end of its run.* 4"):
        loop.steps(1)


def test_one_process_alone_may_save_the_finished_model(make, monkeypatch, tmp_path):
    loop = Loop(make, PRUNE).steps()
    model = loop.accelerator.unwrap_model(loop.model)
    monkeypatch.setattr(Session, "swapped", None)  # which every process must enter
    model.save_pretrained(tmp_path / "end")
    assert Receipt.read(tmp_path / "end")["finished"]


def test_factors_are_counted_in_what_is_saved_and_get_a_name_that_from_pretrained_does_not_look_for(make, tmp_path):
    loop = Loop(make, {"low_rank": {"rank": 4, "min_size": 0}}).steps()
    model = loop.accelerator.unwrap_model(loop.model)
    model.save_pretrained(tmp_path / "end")
    assert not (tmp_path / "end" / "model.safetensors").exists()
    assert load_file(tmp_path / "end" / "low_rank.safetensors").keys() == model.state_dict().keys()


def test_a_validation_sees_the_average_and_checkpoints_do_not(make, tmp_path):
    loop = Loop(make, {"average": {"kind": "ema", "decay": 0.5}}).steps(2)
    trained = loop.model.classifier.weight.clone()
    loop.model.eval()
    assert not torch.equal(loop.model.classifier.weight, trained)
    loop.accelerator.save_state(str(tmp_path / "state"))
    assert torch.equal(load_file(tmp_path / "state" / "model.safetensors")["classifier.weight"], trained)
    loop.model.train()
    assert torch.equal(loop.model.classifier.weight, trained)
    loop.steps(2).accelerator.end_training()
    assert not torch.equal(loop.model.classifier.weight, trained)


def test_bf16_trains_with_prune_and_qat(make):
    loop = Loop(make, {**PRUNE, "qat": {"scheme": "int8"}}, mixed_precision="bf16").steps()
    loop.accelerator.end_training()
    assert zeros(loop.model.state_dict()) > 0.45


def test_a_teacher_may_be_prepared_too(make):
    accelerator, model, teacher = Accelerator(cpu=True), make.classifier(), make.classifier(seed=7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared = prepare(accelerator, teacher, model, optimizer, recipe=PRUNE, total_steps=3)
    assert prepared[2].eff_loop.inner is model
    accelerator.end_training()
    assert "before its first step" in " ".join(prepared[2].eff_loop.session.notes)


def test_an_accelerator_may_train_another_model_behind_the_first(make, tmp_path):
    loop = Loop(make, PRUNE).steps()
    loop.accelerator.save_model(loop.model, tmp_path / "first")
    other = make.classifier(seed=7)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other, optimizer = prepare(loop.accelerator, other, optimizer, recipe=PRUNE, total_steps=2)
    other.train()
    for batch in [*loop.loader][:2]:
        loop.accelerator.backward(other(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    loop.accelerator.end_training()
    assert optimizer.eff_loop.session.step == 2
    assert zeros(other.state_dict()) > 0.45
    assert Receipt.read(tmp_path / "first")["steps"]["applied"] == STEPS


@pytest.mark.parametrize("again", ["the same model", "another model", "without techniques", "a plain prepare"])
def test_a_loop_that_was_left_by_an_error_leaves_nothing_to_the_next(make, tmp_path, again):
    loop, batch = Loop(make, PRUNE).steps(2), next(iter(DataLoader(make.examples(), batch_size=8)))
    left, old = loop.optimizer.eff_loop, loop.optimizer
    loop.accelerator.backward(loop.model(**batch).loss)
    loop.accelerator.clip_grad_norm_(loop.model.parameters(), 1.0)  # Ctrl-C here
    model = loop.model if again == "the same model" else make.classifier(seed=7)
    optimizer, recipe = torch.optim.SGD(model.parameters(), lr=0.1), {} if again == "without techniques" else PRUNE
    if again == "a plain prepare":
        model, optimizer = loop.accelerator.prepare(model, optimizer)
    else:
        model, optimizer = prepare(loop.accelerator, model, optimizer, recipe=recipe, total_steps=2)
    model.train()
    for _ in range(2):
        loop.accelerator.backward(model(**batch).loss)
        loop.accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(TrainingError, match="after the end of its run, at step 2 of 4"):
        old.step()
    loop.accelerator.end_training()
    assert left.session.is_finished
    assert left.session.step == 2
    assert (zeros(model.state_dict()) > 0.45) == (again in ("the same model", "another model"))
    receipt = Receipt.read(tmp_path)
    assert receipt["finished"] == hasattr(optimizer, "eff_loop")


def test_clipping_another_model_neither_ends_nor_skips_a_step(make):
    loop, critic = Loop(make, PRUNE), make.classifier(seed=7)
    batch = next(iter(loop.loader))
    other, optimizer = loop.accelerator.prepare(critic, torch.optim.SGD(critic.parameters(), lr=0.1))
    for _ in range(3):
        loop.accelerator.backward(other(**batch).loss)
        loop.accelerator.clip_grad_norm_(other.parameters(), 1.0)
        optimizer.step()
        loop.optimizer.zero_grad()
        loop.steps(1)
    assert (loop.session.step, loop.session.skipped) == (3, 0)


def test_a_second_model_is_refused_before_the_first_was_trained(make):
    loop, other = Loop(make, PRUNE), make.classifier()
    with pytest.raises(ConfigError, match="must train one model with techniques at a time"):
        prepare(loop.accelerator, other, torch.optim.SGD(other.parameters(), lr=0.1), recipe=PRUNE, total_steps=1)


def refused(make, **given):
    model = make.classifier()
    accelerator = Accelerator(cpu=True, **given.pop("options", {}))
    objects = given.pop("objects", lambda model: (model, torch.optim.SGD(model.parameters(), lr=0.1)))(model)
    prepare(accelerator, *objects, **{"recipe": PRUNE, "total_steps": 3, **given})


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({"total_steps": None}, ConfigError, "total_steps must be .*, got none"),
        ({"total_steps": 0}, ConfigError, "total_steps must be the number of optimizer steps of the run, got 0"),
        ({"objects": lambda model: (model,)}, ConfigError, "one model and its optimizer"),
        (
            {"recipe": {"soup": {"kind": "uniform"}}},
            CompatibilityError,
            "soup cannot be combined with your own training loop",
        ),
        (
            {"recipe": {"dp": {"noise_multiplier": 1.0}}},
            ConfigError,
            "training DataLoader",
        ),
        (
            {
                "recipe": {"average": {"kind": "ema"}},
                "objects": lambda model: (model, torch.optim.LBFGS(model.parameters())),
            },
            CompatibilityError,
            "LBFGS",
        ),
        (
            {"recipe": {"qat": {"scheme": "int8"}, "prune": {"sparsity": 0.5, "end": 9}}},
            ConfigError,
            "within the 3 steps",
        ),
    ],
)
def test_what_cannot_run_is_refused_before_training(make, given, error, told):
    with pytest.raises(error, match=told):
        refused(make, **given)


PRIVATE = {"dp": {"noise_multiplier": 1.0, "delta": 1e-3, "seed": 1}}


def test_a_private_loop_trains_on_drawn_batches_alone(make):
    loop = Loop(make, PRIVATE, split_batches=True)
    drawn = loop.loader.batch_sampler
    assert (drawn.num_examples, drawn.expected) == (len(make.examples()), 8)
    assert [len(batch["labels"]) for batch in loop.loader] == [max(len(drawn.part(n, 0)), 1) for n in range(len(drawn))]
    loop.steps()
    report = loop.session.receipt().values["techniques"]["dp"]
    assert (report["steps"], report["sampling"]) == (STEPS, "poisson")
    assert not loop.session.notes  # the model returns its loss, which is compared with its halves'
    other = Loop(make, PRIVATE)
    other.accelerator.backward(other.model(**next(iter(other.loader))).loss)
    with pytest.raises(TrainingError, match=r"one drawn batch in 1 parts.* after 1"):
        other.model(**next(iter(other.loader)))
    other = Loop(make, PRIVATE)
    other.loader = DataLoader(make.examples(), batch_size=8, collate_fn=default_data_collator)
    with pytest.raises(TrainingError, match=r"Poisson sampling.*; pass the DataLoader"):
        other.steps(1)
    with pytest.raises(CompatibilityError, match=r"got DataLoaderDispatcher; .*dispatch_batches"):
        Loop(make, PRIVATE, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))


def test_a_mean_over_tokens_of_several_rows_is_refused_in_a_private_loop(make):
    model = make.language_model()
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(make.texts(), batch_size=16)
    given = {"recipe": PRIVATE, "total_steps": STEPS}
    model, optimizer, loader = prepare(Accelerator(cpu=True), model, optimizer, loader, **given)
    model.train()
    with pytest.raises(CompatibilityError, match="labels, got 2 to 7"):
        model(**next(iter(loader)))


def test_fsdp_that_accelerate_would_leave_out_without_a_word_is_refused(make, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(CompatibilityError, match="accelerate does not shard here"):
        refused(make)


def test_what_would_train_without_techniques_is_refused(make):
    loop = Loop(make, {"distill": {"teacher": make.classifier(seed=7)}})
    batch = next(iter(loop.loader))
    with pytest.raises(TrainingError, match=r"optimizer.step must follow accelerator.backward\(loss\), got a step"):
        loop.optimizer.step()
    loop.accelerator.backward(loop.model(**batch).loss)
    with pytest.raises(TrainingError, match="2 backward calls, but distill expects at most 1"):
        loop.accelerator.backward(loop.model(**batch).loss)
    loop.optimizer.zero_grad()
    loop.model.eval()
    with pytest.raises(TrainingError, match="eval mode"):
        loop.accelerator.backward(loop.model(**batch).loss)


def test_a_checkpoint_without_the_techniques_is_refused(make, tmp_path):
    Accelerator(cpu=True).save_state(str(tmp_path / "other"))
    loop = Loop(make, PRUNE)
    with pytest.raises(CheckpointError, match="was saved without efftrain"):
        loop.accelerator.load_state(str(tmp_path / "other"))


SCRIPT = """
import sys, torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, default_data_collator, get_scheduler

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
model = BertForSequenceClassification(BertConfig(vocab_size=24, max_position_embeddings=16, **sizes))
data = [{"input_ids": row, "labels": row[0] % 2} for row in torch.randint(1, 24, (32, 8))]
loader = DataLoader(data, batch_size=4, collate_fn=default_data_collator, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = get_scheduler("linear", optimizer=optimizer, num_warmup_steps=0, num_training_steps=8)
if "apart" in sys.argv:
    optimizer = accelerator.prepare(optimizer)
if "plain" not in sys.argv:
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    model.eval()
    accuracy = [accelerator.gather_for_metrics(model(**batch).logits) for batch in loader]
accelerator.wait_for_everyone()
accelerator.unwrap_model(model).save_pretrained("out", save_function=accelerator.save)
"""


def eff_run(tmp_path, script, *arguments):
    (tmp_path / "loop.py").write_text(script)
    return eff("run", tmp_path / "loop.py", *arguments)


def test_eff_run_puts_techniques_into_a_loop_that_nobody_edits(tmp_path):
    prepared = "optimizer, loader = accelerator.prepare(model, optimizer, loader)"
    script = SCRIPT.replace(
        prepared, "optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)"
    )
    flags = ["--prune_sparsity", "0.8", "--qat_scheme", "int8", "--average_kind", "ema"]
    result = eff_run(tmp_path, script, *flags)
    assert result.exit_code == 0
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert zeros(model.state_dict()) == pytest.approx(0.8, abs=0.03)
    receipt = json.loads((tmp_path / "out" / "eff_receipt.json").read_text())
    assert receipt["front_end"] == "accelerate"
    assert receipt["steps"] == {"applied": 8, "skipped": 0, "planned": 8}
    assert receipt["finished"]


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ((), ConfigError, "got none.*.*--eff_total_steps"),
        (("apart",), ConfigError, "one model and its optimizer"),
        (("plain",), CompatibilityError, "an optimizer stepped before any of them"),
        (
            ("--eff_total_steps", "many"),
            ConfigError,
            "--eff_total_steps must be a number of optimizer steps, got 'many'",
        ),
    ],
)
def test_eff_run_stops_a_loop_that_it_cannot_hook_before_it_trains(tmp_path, arguments, error, told):
    with pytest.raises(error, match=told):
        eff_run(tmp_path, SCRIPT, "--prune_sparsity", "0.8", *arguments)
    assert not (tmp_path / "out").exists()


def test_a_loop_that_ends_without_a_word_is_told_at_exit(make, tmp_path, capsys):
    loop = Loop(make, PRUNE).steps(2)
    loop.optimizer.eff_loop.at_exit()
    assert "not finished: the loop ended after 2 of 4 steps" in capsys.readouterr().out.replace("\n", " ")
    receipt = Receipt.read(tmp_path)
    assert not receipt["finished"]
    assert isinstance(loop.optimizer.eff_loop, AcceleratedLoop)
