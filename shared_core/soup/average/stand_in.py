"""The exchange of weights and their average in a model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from operator import is_

import torch
from torch import Tensor, nn

from shared_core.ranks import local_part
from shared_core.sharded import is_sharded, reshard_
from shared_core.soup.average.running import RunningAverage

_STATISTICS = ("running_mean", "running_var")


class StandIn:
    """Puts an average in the place of a model's trained parameters and batch norm statistics, and takes it out again.

    Tensors are exchanged one by one, so that beside the average one more tensor is held; parameters of another dtype
    than the average's (16 bit) need a copy of the weights as long as it is in. Nothing else may write into the
    parameters meanwhile.

    Args:
        model: Whose parameters; those that FSDP2 has sharded are exchanged in the part that this process holds.
        trained: Parameters that count as trained though they are frozen now: the turn of a GAN's other half.
    """

    def __init__(self, model: nn.Module, trained: Iterable[Tensor] = ()) -> None:
        self._model, self._owned = model, [module._parameters for module in model.modules() if module._parameters]
        self._own, known = self._now_own(), set(map(id, trained))
        named = model.named_parameters()
        self.parameters = {name: value for name, value in named if is_trained(value) or id(value) in known}
        averaged = set(map(id, self.parameters.values()))
        self._others = [value for value in self._own if value is not None and id(value) not in averaged]
        self.norms = {
            name: buffer
            for name, buffer in model.named_buffers()
            if name.rpartition(".")[2] in (*_STATISTICS, "num_batches_tracked")
        }
        """Mean, variance and count of batches of every batch norm; the count is not averaged."""
        self._averaged = self.parameters | {n: buffer for n, buffer in self.norms.items() if n.endswith(_STATISTICS)}
        self._is_sharded = any(map(is_sharded, self.parameters.values()))
        self._aside: dict[str, Tensor] = {}
        self._exchanged: set[str] = set()

    def changed(self) -> list[str]:
        """Return the names of the parameters that became trainable since then, or were replaced."""
        # every step asks: names, which take long to put together, are looked up where there is a difference alone
        own = self._now_own()
        are_same = len(own) == len(self._own) and all(map(is_, own, self._own))
        if are_same and not any(map(is_trained, self._others)):
            return []
        reshard_(self._model)  # a whole one may be in the place of FSDP2's part
        now, before = dict(self._model.named_parameters()), self.parameters
        replaced = {name for name, value in before.items() if now.get(name) is not value}
        return sorted(replaced | {name for name, value in now.items() if is_trained(value) and name not in before})

    def _now_own(self) -> list[Tensor | None]:
        return [*chain.from_iterable(map(dict.values, self._owned))]

    def live(self) -> Mapping[str, Tensor]:
        """Return what is averaged, as it is in the model now, to use without gradients."""
        if not self._is_sharded:
            return self._averaged
        return {name: local_part(value) for name, value in self._averaged.items()}

    def own_names(self) -> dict[str, str]:
        """Return the name here of every parameter and buffer of the model, empty for those that are left alone.

        A tied parameter has several names in the model and one here.
        """
        here = {id(value): name for name, value in {**self.parameters, **self.norms}.items()}
        model = self._model
        own = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        return {name: here.get(id(value), "") for name, value in own}

    @property
    def has_average(self) -> bool:
        """Whether there is an average to exchange with, in the model or, for the moment, beside it."""
        return bool(self._aside)

    @property
    def is_in(self) -> bool:
        """Whether the model holds the average."""
        return bool(self._exchanged)

    def put_in(self, running: RunningAverage, norms: Mapping[str, Tensor]) -> None:
        """Put an average in, with other buffers of batch norms where `norms` has them."""
        with writing():
            for name, value in self.live().items():
                average = running.average(name)
                alike = average.dtype == value.dtype and name not in self.norms
                self._aside[name] = average if alike else average.to(value.dtype, copy=True)
            for name, buffer in self.norms.items():
                self._aside.setdefault(name, buffer.clone())
                self._aside[name].copy_(norms.get(name, self._aside[name]))
        self.exchange(average=True)

    def put_out(self) -> None:
        """Put the weights back; the average has its memory again. Without an average nothing happens."""
        if self._aside:
            self.exchange(average=False)
            self._aside = {}

    @contextlib.contextmanager
    def lent(self, put_in: Callable[[], None]) -> Iterator[None]:
        """Have the average in for a while: the one that was taken out for the moment, or what `put_in` puts in."""
        was_beside = self.has_average
        self.exchange(average=True) if was_beside else put_in()
        try:
            yield
        finally:
            self.exchange(average=False) if was_beside else self.put_out()

    def stay_in(self) -> None:
        """Let the weights go that the average has taken the place of."""
        self._aside, self._exchanged = {}, set()

    def exchange(self, *, average: bool) -> None:
        """Let the model hold the average, or its weights again; those that it holds already stay."""
        with writing():
            for name, value in {**self.live(), **self.norms}.items():
                if (name in self._exchanged) is average:
                    continue
                other, held = self._aside[name], value.clone()
                try:
                    value.copy_(other)
                finally:  # interrupted in between, the weights are not lost
                    other.copy_(held)
                    self._exchanged ^= {name}
        reshard_(self._model)  # FSDP2 would compute with the weights of before

    def kept(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return values of the average, where their memory holds the model's weights those in the model."""
        live = self.live() if self._exchanged else {}
        borrowed = {name for name in self._exchanged if self._aside[name] is values.get(name)}
        return {name: live[name].detach() if name in borrowed else value for name, value in values.items()}


def is_trained(parameter: Tensor) -> bool:
    """Return whether a parameter is one to average: trainable and not an integer."""
    return parameter.requires_grad and (parameter.is_floating_point() or parameter.is_complex())


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Allow writing into weights, and make tensors that may be written later: Lightning validates in inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield
