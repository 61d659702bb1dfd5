"""Speech and tones whose truth is known, made at the time of the benchmark: 16 kHz, float32, in [-1, 1].

Speech is what eSpeak NG says (``espeakng-loader`` ships its library and voices), tones are sums of harmonics.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

RATE = 16_000
SENTENCES = (
    "The boat left the harbour before the sun was up.",
    "Please write your name in the space below the line.",
    "A large dog slept by the fire all afternoon.",
    "Nobody expected the train to arrive on time.",
    "She bought seven oranges and a small loaf of bread.",
    "The old bridge was closed for repair last winter.",
    "We measured the water twice and found it clean.",
    "His letter came three weeks after the meeting.",
)
VOICES = tuple(
    f"en-us+{variant}"
    for variant in (
        "m1", "m2", "m3", "m4", "m5", "m6", "m7", "f1", "f2", "f3", "f4", "f5",
        "Alex", "Alicia", "Andrea", "Andy", "Annie", "Denis", "Gene", "Jacky", "Lee", "Mario", "Michael", "belinda",
        "boris", "caleb", "david", "ed", "gustave", "iven", "linda", "steph",
    )
)  # fmt: skip


@functools.cache
def _espeak() -> tuple[ctypes.CDLL, int, list[np.ndarray], object]:
    """Return the library, its sampling rate, the list that its callback fills, and that callback, to keep it alive."""
    import espeakng_loader

    library = ctypes.CDLL(espeakng_loader.get_library_path())
    rate = library.espeak_Initialize(1, 0, str(espeakng_loader.get_data_path()).encode(), 0)  # 1: hand samples back
    chunks: list[np.ndarray] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
    def keep(samples: ctypes._Pointer[ctypes.c_short], count: int, _: int | None) -> int:
        if samples and count:
            chunks.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    library.espeak_SetSynthCallback(keep)
    return library, rate, chunks, keep


@functools.cache
def speech(sentence: str, voice: str) -> np.ndarray:
    """Return a sentence as a voice says it, its silence at both ends cut off."""
    from scipy.signal import resample_poly

    library, rate, chunks, _ = _espeak()
    chunks.clear()
    library.espeak_SetVoiceByName(voice.encode())
    text = sentence.encode() + b"\0"
    library.espeak_Synth(text, len(text), 0, 1, 0, 1, None, None)  # 1: from a position of characters; 1: UTF-8
    library.espeak_Synchronize()
    said = np.concatenate(chunks).astype(np.float32) / 32768
    said = resample_poly(said, RATE, rate).astype(np.float32)
    loud = np.flatnonzero(np.abs(said) > 0.01)
    return said[loud[0] : loud[-1] + 1]


def tones(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return frames of a harmonic sound in noise ``(count, 1024)``, normalized as CREPE wants them, and their pitch.

    Pitch is even in log frequency from 50 to 1,000 Hz, up to 40 harmonics fall off by 3 to 12 dB an octave under two
    formants, and noise is 0 to 30 dB below; the pitch glides by up to 2 % in a frame, the truth is that of its middle.

    Returns:
        Frames, and the pitch in Hz ``(count,)``.
    """
    pitch = 50 * 20 ** torch.rand(count, generator=generator)
    glide = 0.02 * (2 * torch.rand(count, 1, generator=generator) - 1)
    time = (torch.arange(1024) - 511.5) / RATE
    angle = 2 * math.pi * pitch[:, None] * (time + glide * time.square() / (1024 / RATE))
    slope, snr = 0.5 + 1.5 * torch.rand(count, generator=generator), 30 * torch.rand(count, generator=generator)
    formants = 300 * 10 ** torch.rand(count, 2, generator=generator)
    sound = torch.zeros(count, 1024)
    for k in range(1, 41):
        hertz = k * pitch
        gain = k**-slope * (0.1 + (-(((hertz[:, None] - formants) / 250).square())).exp().sum(1))
        phase = 2 * math.pi * torch.rand(count, 1, generator=generator)
        sound += torch.where(hertz < RATE / 2, gain, 0.0)[:, None] * (k * angle + phase).cos()
    noise = torch.randn(count, 1024, generator=generator) * sound.std(1, keepdim=True)
    sound = sound + noise * 10 ** (-snr / 20)[:, None]
    sound = sound - sound.mean(1, keepdim=True)
    return sound / sound.std(1, keepdim=True), pitch


def scenes(count: int, generator: torch.Generator, frame: int = 512) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ten seconds of speech and pauses in noise ``(160000,)``, and whether each frame of it holds speech.

    A frame is counted as speech if the speaker is within 40 dB of their loudest frame.
    """
    draw = np.random.default_rng(int(torch.randint(1 << 31, (1,), generator=generator)))
    for _ in range(count):
        clean = np.zeros(10 * RATE, np.float32)
        at = int(draw.uniform(0.2, 1.5) * RATE)
        voice = str(draw.choice(VOICES))
        while at < len(clean):
            said = speech(str(draw.choice(SENTENCES)), voice)[: len(clean) - at]
            clean[at : at + len(said)] = said
            at += len(said) + int(draw.uniform(0.5, 2.0) * RATE)
        frames = clean[: len(clean) // frame * frame].reshape(-1, frame)
        power = np.sqrt((frames**2).mean(1))
        spoken = power > power.max() * 0.01
        color = draw.uniform(0, 0.95)  # white to brownish
        noise = draw.standard_normal(len(clean)).astype(np.float32)
        from scipy.signal import lfilter

        noise = lfilter([1.0], [1.0, -color], noise)
        noise *= power[spoken].mean() / noise.std() * 10 ** (-draw.uniform(0, 15) / 20)
        yield torch.tensor(clean + noise, dtype=torch.float32), torch.tensor(spoken)
