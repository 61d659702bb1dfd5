"""The trained part of a model in separate files, without the rest of the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar


class TrainedPart(ABC):
    """The trained part of a model, as files that stock libraries load onto the base model."""

    name: ClassVar[str]
    """Name of its folder next to the receipt, if checkpoints hold the whole model."""

    @abstractmethod
    def write(self, folder: Path) -> None:
        """Write the files into a folder, which is created if needed."""

    @abstractmethod
    def differences(self, folder: Path) -> list[str]:
        """Return how the files in a folder differ from this part, one line each."""

    def write_beside(self, folder: Path) -> None:
        """Write the files into their own folder next to the whole weights or a receipt."""
        self.write(folder / self.name)
