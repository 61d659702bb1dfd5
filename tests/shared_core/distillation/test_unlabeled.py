"""Examples without labels in a loop of one's own: what counts, what the labels become, what is refused."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shared_core import Session
from shared_core.distillation import kd_loss
from shared_core.distillation.unlabeled import labeled_part, positions_ahead, rows_that_count, split_batch, zero_of
from shared_core.engine.recipe import Recipe
from shared_core.errors import ConfigError, TrainingError

FIELD = "new"


class Net(nn.Module):
    def __init__(self, seed=0, classes=3):
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Linear(4, classes)

    def forward(self, x, labels=None):
        logits = self.net(x)
        return {"logits": logits} | ({} if labels is None else {"loss": F.cross_entropy(logits, labels)})


def started(model=None, **options):
    session = Session(Recipe.from_dict({"distill": {"teacher": Net(1), "alpha": 0.4, **options}}))
    model = model or Net()
    session.attach(model)
    session.begin([torch.optim.SGD(model.parameters(), lr=0.1)], total_steps=4)
    return session, model


def batch(flags, seed=3):
    generator = torch.Generator().manual_seed(seed)
    x, labels = torch.randn(len(flags), 4, generator=generator), torch.randint(3, (len(flags),), generator=generator)
    return {"x": x, "labels": labels, FIELD: torch.tensor(flags)}


@pytest.mark.parametrize("flags", [[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
@pytest.mark.parametrize("by", ["field", "labels"])
def test_unlabeled_examples_learn_from_the_teacher_alone(flags, by):
    session, model = started(unlabeled_field=FIELD if by == "field" else None)
    given, new = batch(flags), torch.tensor(flags).bool()
    truth = given["labels"].clone()
    if by == "field":
        seen = session.techniques["distill"].prepare_batch(given)
    else:
        given.pop(FIELD)
        seen = given | {"labels": truth.masked_fill(new, -100)}
    assert set(seen) == {"x", "labels"}
    assert torch.equal(given["labels"], truth)  # the batch of the caller is as it was
    loss = session.loss(model(**seen)["loss"])
    loss.backward()
    twin, teacher = copy.deepcopy(model).double(), Net(1).double()
    twin.zero_grad()
    logits = twin(given["x"].double())["logits"]
    task = F.cross_entropy(logits[~new], truth[~new]) if not all(flags) else 0.0
    soft = kd_loss(logits, teacher(given["x"].double())["logits"].detach(), temperature=2.0)
    expected = 0.4 * task + 0.6 * soft
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)  # of sums in float32
    torch.testing.assert_close(model.net.weight.grad.double(), twin.net.weight.grad, atol=1e-6, rtol=0)
    report = session.receipt()["techniques"]["distill"]
    if by == "field" or any(flags):
        assert report["unlabeled_examples"] == report["unlabeled_positions"] == sum(flags)
        assert report["labeled_examples"] == 4 - sum(flags)


def test_the_task_loss_of_no_label_is_zero_outside_of_the_range_too():
    session, model = started(unlabeled_field=FIELD, begin=2)
    seen = session.techniques["distill"].prepare_batch(batch([1, 1]))
    loss = session.loss(model(**seen)["loss"])
    loss.backward()
    assert loss.item() == 0
    assert not model.net.weight.grad.any()


def test_only_confident_answers_teach_an_unlabeled_example():
    given = batch([1, 1, 1, 1, 0])
    threshold = float(Net(1)(given["x"])["logits"].softmax(-1).amax(-1)[:4].median()) - 1e-3
    session, model = started(unlabeled_field=FIELD, divergence="hard_label", confidence=threshold, alpha=0.0)
    seen = session.techniques["distill"].prepare_batch(given)
    logits = model(**seen)
    sure = Net(1)(given["x"])["logits"].softmax(-1)
    keep = sure.amax(-1) >= threshold
    assert 0 < keep[:4].sum() < 4
    loss = session.loss(logits["loss"])
    each = F.cross_entropy(logits["logits"][keep], sure.argmax(-1)[keep], reduction="sum")
    torch.testing.assert_close(loss, each / 5)
    assert session.receipt()["techniques"]["distill"]["unlabeled_positions"] == keep[:4].sum()


def test_counts_are_part_of_the_state():
    session, model = started(unlabeled_field=FIELD)
    technique = session.techniques["distill"]
    session.loss(model(**technique.prepare_batch(batch([0, 1, 1])))["loss"])
    resumed, other = started(unlabeled_field=FIELD)
    resumed.techniques["distill"].begin(resumed.context, technique.state_dict())
    resumed.loss(other(**resumed.techniques["distill"].prepare_batch(batch([1, 0])))["loss"])
    told = resumed.techniques["distill"].report()
    assert (told["labeled_examples"], told["unlabeled_examples"]) == (2, 3)
    assert resumed.figures()["distill/unlabeled_share"] == 0.5


def test_a_loop_that_does_not_tell_is_refused_and_one_that_sees_none_is_told(capsys):
    session, model = started(unlabeled_field=FIELD)
    given = batch([0, 0])
    output = model(given["x"], given["labels"])
    with pytest.raises(TrainingError, match=r"unlabeled_field.*prepare_batch"):
        session.loss(output["loss"])
    session.loss(model(**session.techniques["distill"].prepare_batch(given))["loss"])
    session.finish()
    assert "new marked no example as unlabeled" in capsys.readouterr().out
    assert session.receipt()["techniques"]["distill"]["unlabeled_field"] == "new marked no example as unlabeled"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x": torch.zeros(2), "labels": torch.zeros(2).long()}, "must be a key of every batch, got x, labels"),
        ({"labels": torch.zeros(2).long(), FIELD: torch.tensor([0.0, 1.0])}, "bool for each of 2 .*float32"),
        ({"labels": torch.zeros(2).long(), FIELD: torch.tensor([0, 1, 1])}, r"bool for each of 2 .*\(3,\)"),
        ({"labels": torch.zeros(2).long(), FIELD: [0, 2]}, r"bools, or 0 and 1, got \[0, 2\]"),
        ({"labels": torch.zeros(2).bool(), FIELD: [0, 1]}, r"signed integers or floats.*got torch\.bool"),
        ((torch.zeros(2), torch.zeros(2)), "must be a key of every batch, got a tuple; .*dicts"),
    ],
)
def test_a_batch_that_does_not_tell_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        split_batch(given, FIELD)


def test_options_and_models_that_do_not_fit_are_refused():
    model = Net()
    model.config = type("Config", (), {"is_encoder_decoder": True})()
    with pytest.raises(ConfigError, match="must be none for an encoder-decoder"):
        started(model, unlabeled_field=FIELD)


def test_what_is_counted_ahead_is_what_counts():
    real = (torch.arange(6) < torch.tensor([[6], [3], [1], [4]])).long()
    labels = torch.randint(5, (4, 6)).masked_fill(torch.rand(4, 6) < 0.3, -100)
    for causal in (False, True):
        for told in (None, torch.tensor([True, False, True, False]), torch.ones(4, dtype=torch.bool)):
            for mask in (None, real):
                given = {"input_ids": labels, "labels": labels} | ({} if mask is None else {"attention_mask": mask})
                rows = rows_that_count((4, 6), labels, mask, causal=causal, unlabeled=told)
                by_hand = [
                    sum(
                        (1 if mask is None else int(mask[i, j])) if told is not None and told[i]
                        else int(labels[i, j] != -100) for j in range(int(causal), 6)
                    ) for i in range(4)
                ]  # fmt: skip
                assert rows.sum(1).tolist() == by_hand
                assert positions_ahead(given, told, causal=causal, per_token=True) == sum(by_hand)
    nothing = {"input_ids": labels, "attention_mask": real}
    assert positions_ahead(nothing, None, causal=True, per_token=True) == real[:, 1:].sum()
    assert positions_ahead(nothing, None, causal=False, per_token=False) == 4
    assert positions_ahead({"labels": torch.zeros(4, 2)}, None, causal=False, per_token=False) == 4
    # labels of a flattened batch of sequences are none of examples
    flat = rows_that_count((24,), labels.flatten(), real, causal=False, unlabeled=None)
    assert torch.equal(flat, labels.flatten() != -100)


def test_float_labels_become_nan_and_a_loss_that_leaves_them_out_stays_finite():
    labels = split_batch({"labels": torch.ones(3, 2), FIELD: [True, False, True]}, FIELD)[0]["labels"]
    assert labels.isnan().tolist() == [[True] * 2, [False] * 2, [True] * 2]
    outputs = torch.zeros(3, 2, requires_grad=True)
    for rows in (labels, labels[:1]):
        present = ~rows.isnan().any(-1)
        task = F.mse_loss(outputs[: len(rows)][present], rows[present])
        labeled_part(task, rows, causal=False).backward()
        assert outputs.grad.isfinite().all()
    assert not math.isnan(labeled_part(task, labels[:1], causal=False))


def test_zero_of_a_forward_reaches_every_parameter():
    net = Net()
    zero_of({"loss": None, "logits": net(torch.ones(2, 4))["logits"] - math.inf}).backward()
    assert not net.net.weight.grad.any()
    with pytest.raises(TrainingError, match="logits with gradients"):
        zero_of((torch.zeros(2),))
