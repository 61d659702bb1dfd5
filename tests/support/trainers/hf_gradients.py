"""First gradients of distillation through the Trainer, and the float64 reference of them."""

import torch
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback

from hf_eff import attach

ALPHA, T = 0.3, 2.0


class InOrder(Trainer):
    """Takes the data in order."""

    def _get_train_sampler(self, *args, **kwargs):
        return SequentialSampler(self.train_dataset)


class Gradients(TrainerCallback):
    def __init__(self):
        self.first = None

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if self.first is None:
            self.first = {name: value.grad.clone() for name, value in model.named_parameters()}


def first_gradients(
    make, folder, size, windows, model=None, extra=None, alpha=ALPHA, teacher=None, distill=None, **settings
):
    gradients = Gradients()
    teacher = teacher or make.language_model(seed=5, hidden_size=32)
    trainer = make.trainer(
        folder, model=model or make.language_model(), data=make.texts(8), callbacks=[gradients],
        per_device_train_batch_size=size, gradient_accumulation_steps=windows, max_steps=1, max_grad_norm=0.0,
        optim="sgd", extra=extra, **settings,
    )  # fmt: skip
    attach(trainer, {"distill": {"teacher": teacher, "temperature": T, "alpha": alpha, **(distill or {})}})
    trainer.train()
    return gradients.first


def reference(make, smoothing=0.0, alpha=ALPHA, student=None, teacher=None, texts=None):
    """D1 on the joined window, in float64, from the formula: each text alone."""
    student = (student or make.language_model()).double()
    teacher = (teacher or make.language_model(seed=5, hidden_size=32)).double()
    texts = texts or make.texts(8)
    labels = torch.cat([text["labels"][1:] for text in texts])
    counts = labels != -100

    def logits(model):
        return torch.cat([model(input_ids=text["input_ids"][None]).logits[0, :-1] for text in texts])[counts].double()

    ours, theirs = logits(student), logits(teacher).detach()
    hard = -(ours.log_softmax(-1).gather(-1, labels[counts][:, None])).mean() * (1 - smoothing)
    hard = hard - smoothing * ours.log_softmax(-1).mean()
    p = (theirs / T).softmax(-1)
    soft = T**2 * (p * (p.log() - (ours / T).log_softmax(-1))).sum(-1).mean()
    (alpha * hard + (1 - alpha) * soft).backward()
    return {name: value.grad.float() for name, value in student.named_parameters() if value.grad is not None}


def largest_difference(first, second):
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def distance(first, second):
    largest = max(value.abs().max() for value in first.values())
    return largest_difference(first, second) / float(largest)
