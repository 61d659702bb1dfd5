"""A script that trains without the recipe is stopped early, whatever steps; other backward passes are not training."""

import pytest
import torch
from torch import nn

from shared_core.errors import CompatibilityError
from shared_core.front_ends.unseen_steps import UnseenSteps


class End:
    is_used = False

    def used(self):
        return self.is_used


@pytest.fixture
def watched():
    """Yield a front end, and the guard of a script that it has not taken."""
    stock, end = torch.autograd.backward, End()
    guard = UnseenSteps(lambda: [end], "train.py")
    yield end
    guard.remove()
    assert torch.autograd.backward is stock


class OfLists:
    """Holds lists of parameters, as fastai's optimizers do."""

    def __init__(self, model):
        self.param_lists = [list(model.parameters())]

    def step(self):
        for parameter in self.param_lists[0]:
            parameter.data = parameter.data - 0.1 * parameter.grad
            parameter.grad = None


class Variable:
    def __init__(self, value):
        self._value = value


class OfVariables:
    """Holds variables around parameters, as Keras's optimizers do."""

    def __init__(self, model):
        self.variables = [Variable(parameter) for parameter in model.parameters()]

    @torch.no_grad()
    def apply_gradients(self):
        values = [variable._value for variable in self.variables]
        torch._foreach_add_(values, [value.grad for value in values], alpha=-0.1)

    step = apply_gradients


class InBackward:
    """Steps while gradients are computed, as LOMO does."""

    def __init__(self, model):
        self.parameters = list(model.parameters())
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._update)

    @torch.no_grad()
    def _update(self, parameter):
        parameter.sub_(0.1 * parameter.grad)
        parameter.grad = None

    def step(self):
        pass


class Slotted:
    __slots__ = ("held",)

    def __init__(self, model):
        self.held = dict(model.named_parameters())

    def step(self):
        for parameter in self.held.values():
            parameter.data.sub_(parameter.grad, alpha=0.1)


def loss_of(model, inputs=None):
    return model(torch.ones(4, 3) if inputs is None else inputs).square().mean()


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("kind", [OfLists, OfVariables, InBackward, Slotted])
def test_an_optimizer_that_is_not_torchs_is_stopped_after_two_updates_by_name(watched, kind, accumulate):
    model, updates = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), []
    optimizer = kind(model)
    with pytest.raises(CompatibilityError, match=f"but {kind.__name__} updated the weights before any"):
        for _ in range(5):
            for _ in range(accumulate):
                loss_of(model).backward()
            optimizer.step()
            updates.append(1)
    assert len(updates) <= 2


def test_weights_that_no_object_steps_are_seen_too(watched):
    model = nn.Linear(3, 2)
    with pytest.raises(CompatibilityError, match=r"an optimizer that is not one of torch\.optim updated"):
        for _ in range(3):
            loss_of(model).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad


def test_backward_passes_before_training_are_not_training(watched):
    model, image = nn.Linear(3, 2), torch.ones(4, 3, requires_grad=True)
    for _ in range(4):  # the input is changed, as for a saliency map or an adversarial example
        loss_of(model, image).backward()
        image.data += 0.1 * image.grad.sign()
    model.load_state_dict({name: torch.full_like(value, 0.5) for name, value in model.state_dict().items()})
    for _ in range(3):  # the same pass again, and another model
        loss_of(model).backward()
        loss_of(nn.Linear(3, 2)).backward()
    model.weight.data.fill_(float("nan"))
    watched.is_used = True
    stock = torch.autograd.backward
    loss_of(model).backward()
    assert torch.autograd.backward is not stock  # nothing is left of the guard
    optimizer = OfLists(model)
    for _ in range(4):
        loss_of(model).backward()
        optimizer.step()


def test_who_wraps_backward_later_keeps_working(watched):
    called, inner = [], torch.autograd.backward

    def wrapped(*args, **kwargs):
        called.append(1)
        inner(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd, "backward", wrapped)
        watched.is_used = True
        loss_of(nn.Linear(3, 2)).backward()
        loss_of(nn.Linear(3, 2)).backward()
    assert called == [1, 1]
