"""Recipes, flags and texts as users and attackers write them, for hypothesis; and the model that they are tried on."""

import contextlib
import copy
import dataclasses
import datetime
import math
import re
import signal
import types
import typing
from typing import Any, Literal, get_args, get_origin

import torch
from hypothesis import strategies as st
from plain_loop import backward, update
from torch import nn

from shared_core import Session
from shared_core.config.training_time import Position
from shared_core.engine.registry import REGISTRY, flags
from shared_core.engine.services import Services
from shared_core.errors import EffError

SECONDS = 30
ODD = [
    10**400, -(10**30), 2**63, -1, 0, -0.0, 1e308, 5e-324, float("nan"), float("inf"), "nan", "-inf", "1e400",
    "9" * 5000, "", " ", "½", "١", "\ud800", "\x00", "a" * 5000, "🦥", "true", "None", "1,2", "[", "../..", "*", "[!",
    "2ep", "-1ep", "nanep", "1e400ep", "0x10", b"x", {}, [], [[]], [None], {"a": {"b": 1}}, {1: 2}, (1, 2), {1}, 1j,
    ..., object(), int, datetime.date(2020, 1, 1), torch.tensor([1.0, 2.0]),
]  # fmt: skip
odd = st.sampled_from(ODD) | st.integers() | st.floats() | st.text(max_size=8) | st.booleans() | st.none()
NUMBERS = {int: [1, 2, 3, 4, 8, 32, "2", 2.0], float: [0.25, 0.5, 1.0, 2.0, "1e-1", 0.9, 64.0]}
PLACES = [0, 1, 2, "1", 0.0, 0.5, 1.0, "0.5", "1ep", 9, "9ep"]
WORDS = [
    "first", "last", "*", "Linear", "a", "b*", "head", "zzz", "block", "every_k", "sqrt", "auto", "full", "2:4", "1:4",
    "4x4", "eval_loss", "labels", "logits", "b=b", "a=b", "self", "ema", "mutual", "3:64,5:128", "nowhere",
    "0=0", "a=4",
]  # fmt: skip
SMALL = {"low_rank": {"min_size": 0}, "cluster": {"min_size": 0}, "activations": {"min_size": 8}}
"""What lets a technique take a model as small as this one."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = nn.Linear(32, 32)

    def forward(self, x):
        return x + torch.relu(self.b(x))


class Tiny(nn.Module):
    """A layer, two blocks, a norm and a head: a step takes half a millisecond."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.head = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x, labels=None):
        x = self.a(x.to(self.norm.weight.dtype))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"logits": logits} if loss is None else {"loss": loss, "logits": logits}


TEACHER = Tiny()
SPECIAL = {
    "low_rank.rank": [1, "4", 0.5, "energy:0.9", "budget:0.5", "sensitivity:2", "energy:nan", "budget:0"],
    "activations.pack": ["bf16", "int8", "exact"], "activations.offload": [False],
    "checkpointing.policy": ["block", "every_k", "sqrt", "full", "auto", "none", "selective", "budget:0.5"],
    "prune.n_m": ["2:4", "1:4", "4:2", "0:0"], "prune.block": ["4x4", "1x8", "0x1", "99x99"],
    "prune.overrides": [["last:sparsity=0.5"], ["*:sparsity=0"], ["last:sparsity=1"], ["a:b"]],
    "share.bits_of": [["a=4"], ["*=2", "b=3"], ["a=9"]], "lora.base": ["int8", "none"],
    "qat.overrides": [["a:weight_bits=4"], ["*:scheme=int8"], ["a:b"]], "distill.teacher": [TEACHER, "ema", "mutual"],
    "distill.hidden": [["a=a"], ["blocks.*=blocks.*"]], "distill.peers": [2, 3], "dp.noise_multiplier": [0.5, 1.0],
}  # fmt: skip


def plausible(hint: Any, bounds: Any) -> st.SearchStrategy:
    """Values that an option could have, its bounds kept."""
    if hint in (Position, Position | None):
        return st.sampled_from(PLACES)
    if hint is Any:
        return st.sampled_from([TEACHER, 1, 2, 0.5, "0.5", *WORDS])
    if get_origin(hint) in (typing.Union, types.UnionType):
        return plausible(get_args(hint)[0], bounds)
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if get_origin(hint) is tuple:
        return st.lists(plausible(get_args(hint)[0], {}), max_size=2)
    if hint is bool:
        return st.sampled_from([True, False, "true", "False"])
    if hint in NUMBERS:
        low, high = bounds.get("low", bounds.get("above", 0)), bounds.get("high", bounds.get("below", math.inf))
        inside = [number for number in NUMBERS[hint] if low < float(number) < high]
        return st.sampled_from(inside or [bounds.get("low", 60)])
    return st.sampled_from(WORDS)


def options_of(key: str, hostile: bool) -> st.SearchStrategy:
    """A technique's switch and up to four of its options."""
    config_class = REGISTRY[key].config_class
    hints = typing.get_type_hints(config_class)
    values = {}
    for field in dataclasses.fields(config_class):
        special = SPECIAL.get(f"{key}.{field.name}")
        good = st.sampled_from(special) if special else plausible(hints[field.name], field.metadata)
        mixed = st.sampled_from(range(4)).flatmap(lambda n, good=good: good if n else odd)
        values[field.name] = mixed if hostile else good
    switch = {config_class.switch: values.pop(config_class.switch)}
    names = st.lists(st.sampled_from(sorted(values)), max_size=4, unique=True) if values else st.just([])
    some = names.flatmap(lambda chosen: st.fixed_dictionaries({name: values[name] for name in chosen} | switch))
    if hostile:
        return some | st.dictionaries(st.sampled_from([*values, *STRANGE]), odd, max_size=2)
    needed = {field.name: field.metadata.get("only_with", {}) for field in dataclasses.fields(config_class)}

    def fitting(options):
        return {
            name: value
            for name, value in (SMALL.get(key, {}) | options).items()
            if all(options.get(other) in allowed for other, allowed in needed[name].items())
        }

    return some.map(fitting)


STRANGE = ["zzz", "", "\ud800", 3, None]
TECHNIQUES = st.lists(st.sampled_from(sorted(REGISTRY)), min_size=1, max_size=3, unique=True)
OPTIONS = {hostile: {key: options_of(key, hostile) for key in REGISTRY} for hostile in (False, True)}


def recipes_of(hostile: bool) -> st.SearchStrategy:
    """Recipes of one to three techniques."""
    return TECHNIQUES.flatmap(lambda keys: st.fixed_dictionaries({key: OPTIONS[hostile][key] for key in keys}))


strange_recipes = odd | st.dictionaries(st.sampled_from([*REGISTRY, *STRANGE]), odd, max_size=3)
recipes = st.sampled_from(range(8)).flatmap(
    lambda n: strange_recipes if not n else recipes_of(hostile=n == 1)
)  # most must get past the first look at their options


def flag_text(value: Any) -> str:
    """A value as a shell would hand it over."""
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text.replace("\x00", "").encode("utf-8", "replace").decode()


def command_line(recipe: Any) -> list[str]:
    """``--prune_sparsity 0.5 …`` of a recipe's options."""
    if not isinstance(recipe, dict):
        return [flag_text(recipe)]
    words = []
    for key, options in recipe.items():
        for name, value in options.items() if isinstance(options, dict) else [("", options)]:
            words += [flag_text(f"--{key}_{name}"), flag_text(value)]
    return words


flag_lines = recipes.map(command_line) | st.lists(
    st.sampled_from([*(f"--{flag}" for flag in flags()), "--eff_recipe", "--", "-", "--=", "--prune_", "--qat_scheme="])
    | odd.map(flag_text),
    max_size=5,
)  # fmt: skip


@contextlib.contextmanager
def no_hang():
    """Fail what takes longer than anything here should."""

    def ring(number, frame):
        raise AssertionError(f"hangs: longer than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check_told(error: EffError) -> None:
    """Fail an error that states no rule, or is no line that can be read and printed."""
    text = str(error)
    text.encode()
    assert re.search(r"must|is not|matches no|no \w+ can|cannot|needs?|takes|has no|required|were|are", text), text
    assert len(text) < 3000, f"{len(text)} characters: {text[:300]}"


def two_steps(recipe: Any) -> None:
    """Train `Tiny` in a bare loop for two steps."""
    recipe = copy.deepcopy(recipe)  # a teacher is changed by some options
    model = Tiny().bfloat16() if "primary_weights" in recipe else Tiny()
    x, labels = torch.randn(4, 16), torch.arange(4)
    services = Services()
    services.calibrate = lambda num_batches: model(x=x, labels=labels)
    session = Session(recipe, services=services)
    session.attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session.begin([optimizer], total_steps=2, steps_per_epoch=1)
    for _ in range(2):
        with session.forward():
            loss = session.loss(model(x=x, labels=labels)["loss"])
        backward(session, loss)
        update(session, optimizer)
    session.finish()
    session.receipt()


NUMBER_TEXTS = ["0", "1", "2", "-1", "0.5", "1e9", "1e400", "nan", "inf", "9" * 30, "x", "", "½"]


def commands(app: Any, folder: str) -> st.SearchStrategy:
    """Lines for every subcommand of a Typer app: its own options, with plausible and with hostile values."""
    import typer

    lines = []
    for name, command in typer.main.get_command(app).commands.items():
        some = []
        for parameter in command.params:
            flag = parameter.opts[-1]
            texts = st.sampled_from([*NUMBER_TEXTS, *WORDS, folder, f"{folder}/nowhere", "os:getcwd"]) | odd.map(
                flag_text
            )
            if getattr(parameter, "is_flag", False):
                some.append(st.just([flag]))
            elif flag.startswith("-"):
                some.append(texts.map(lambda text, flag=flag: [flag, text]))
            else:
                some.append(texts.map(lambda text: [text]))
        parts = st.lists(st.one_of(some), max_size=5) if some else st.just([])
        lines.append(parts.map(lambda parts, name=name: [name, *(word for part in parts for word in part)]))
    return st.one_of(lines)
