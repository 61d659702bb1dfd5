"""The end of a run: its module and the files that it wrote as final are counted again, after everybody else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_eff._wrapped import Wrapped
from shared_core.claims import Where
from shared_core.errors import ReceiptError
from shared_core.ranks import from_main
from shared_core.session import Session
from shared_core.soup.sources import open_ingredient

_HARMLESS = {"EffCallback", "ProgressBar", "ModelSummary", "Checkpoint"}


class Recount:
    """Compares a run's module and files with its receipt when training ends, and files that are saved later.

    Args:
        trainer: In the setup of `fit`.
        module: The user's.
        session: Of this run.
        differs: Called when the module, or a file of the run, is not what the receipt says.
    """

    def __init__(self, trainer: Any, module: Any, session: Session, differs: Callable[[], None]) -> None:
        self._trainer, self._module, self._session, self._differs = trainer, module, session, differs
        self._files: dict[Path, tuple[int, bool]] = {}
        self._last_step = -1
        self._wrapped = [
            # the last moment at which sharded weights lie where processes can gather them
            Wrapped(trainer, "_teardown", self._before_teardown),
            Wrapped(module, "teardown", self._at_last),
        ]

    def close(self) -> None:
        """Count no more: the model becomes another one."""
        for wrapped in reversed(self._wrapped):
            wrapped.undo()
        self._wrapped = []

    def saved(self, path: Any) -> None:
        """Remember a file that was written in this run; it is read when the run is over."""
        self._files[Path(str(path))] = self._session.step, self._session.is_finished

    def _before_teardown(self, original: Callable[[], None]) -> None:
        if self._session.is_finished and self._last_step < 0:
            self._last_step = self._trainer.global_step
            self._counted(lambda: self._verify(gather=True))
        original()

    def _at_last(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        if self._last_step < 0 or self._trainer.interrupted:
            self.close()
            return
        self.close()
        self._counted(lambda: self._verify(gather=False))
        self._counted(self._verify_files)
        self._wrapped = [Wrapped(self._trainer, "save_checkpoint", self._save_later)]

    def _save_later(self, original: Callable[..., None], filepath: Any, *args: Any, **kwargs: Any) -> None:
        original(filepath, *args, **kwargs)
        if self._trainer.global_step != self._last_step or self._trainer.lightning_module is not self._module:
            self.close()
        elif self._trainer.is_global_zero:
            self._verify_file(Path(str(filepath)), Where.END)

    def _counted(self, verify: Callable[[], None]) -> None:
        try:
            verify()
        except ReceiptError:
            self._differs()
            raise

    def _verify(self, *, gather: bool) -> None:
        self._session.verify(None, "the trained module", self._others(), gather=gather)

    def _verify_files(self) -> None:
        found = ""
        for path, (step, is_final) in self._files.items() if self._trainer.is_global_zero else ():
            if not path.exists() or not (is_final or step == self._session.step):
                continue
            # of shards that training goes on from, the weights in training are saved
            before = Where.TRAINED if path.is_dir() else Where.SAVED
            try:
                self._verify_file(path, Where.END if is_final else before)
            except ReceiptError as error:
                found = found or str(error)
        if found := from_main(found):
            raise ReceiptError(found)

    def _verify_file(self, path: Path, where: Where) -> None:
        if not self._session.claims_of(where):
            return
        try:
            weights = _weights_in(path)
        except Exception as error:  # whatever a CheckpointIO of the user's own makes of it
            self._session.note(f"not counted again in {path}, which cannot be read: {type(error).__name__}: {error}")
            return
        self._session.verify(weights, str(path), self._others(), where=where)

    def _others(self) -> list[str]:
        kinds = [type(callback) for callback in self._trainer.callbacks]
        return [kind.__name__ for kind in kinds if not _HARMLESS & {base.__name__ for base in kind.__mro__}]


class _Shards(Mapping[str, Tensor]):
    """The weights in a folder of shards, each read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._read = open_ingredient(folder)

    def __getitem__(self, name: str) -> Tensor:
        return self._read.tensor(name)

    def __iter__(self) -> Any:
        return iter([*self._read.specs, *self._read.ties])

    def __len__(self) -> int:
        return len(self._read.specs) + len(self._read.ties)


def _weights_in(path: Path) -> Mapping[str, Tensor]:
    """Return the weights that a user's module loads from a checkpoint."""
    if path.is_dir():
        return _Shards(path)
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    weights: Mapping[str, Tensor] = content["state_dict"]
    return weights
