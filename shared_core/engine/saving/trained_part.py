"""The trained part of a model in files of its own, without the rest of the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar


class TrainedPart(ABC):
    """What was trained of a model, as files that stock libraries load over the rest of it."""

    name: ClassVar[str]
    """Of the folder beside the receipt where checkpoints hold the whole model."""

    @abstractmethod
    def write(self, folder: Path) -> None:
        """Write the files into a folder, made if need be."""

    @abstractmethod
    def differences(self, folder: Path) -> list[str]:
        """Return how the files in a folder differ from this part, one line each."""

    def write_beside(self, folder: Path) -> None:
        """Write the files beside whole weights or a receipt, into a folder of their own."""
        self.write(folder / self.name)
