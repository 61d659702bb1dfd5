"""Lines of text whose letters are known, made at the time of the benchmark in the fonts that matplotlib ships."""

from __future__ import annotations

import re

import numpy as np
import sound
import torch
from torch import Tensor

FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSansMono-Oblique", "STIXGeneral", "STIXGeneralItalic")
WORDS = tuple(sorted({word for sentence in sound.SENTENCES for word in re.findall("[A-Za-z]+", sentence)}))


def lines(count: int, seed: int) -> tuple[Tensor, list[str]]:
    """Return gray pictures ``(count, 1, 64, 256)`` in [-1, 1] and their texts: two words, or a word and a number.

    Fonts of 14 to 40 pixels, dark on light or light on dark, in any contrast from 0.3 to 1, blurred and in noise; 64
    high and the rest of the width filled with the last column, as EasyOCR does.
    """
    import matplotlib
    from PIL import Image, ImageDraw, ImageFilter, ImageFont

    draw = np.random.default_rng(seed)
    pictures, texts = [], []
    for _ in range(count):
        second = draw.choice([str(draw.integers(10, 10_000)), str(draw.choice(WORDS))])
        texts.append(f"{draw.choice(WORDS)} {second}")
        file = f"{matplotlib.get_data_path()}/fonts/ttf/{draw.choice(FONTS)}.ttf"
        font = ImageFont.truetype(file, int(draw.integers(14, 41)))
        left, top, right, bottom = font.getbbox(texts[-1])
        dark = draw.uniform(0, 0.7)
        shades = [int(255 * shade) for shade in draw.permutation([dark, draw.uniform(dark + 0.3, 1)])]
        picture = Image.new("L", (int(right - left) + 12, int(bottom - top) + 12), shades[0])
        ImageDraw.Draw(picture).text((6 - left, 6 - top), texts[-1], shades[1], font)
        picture = picture.filter(ImageFilter.GaussianBlur(draw.uniform(0, 1.2)))
        width = min(256, round(picture.width * 64 / picture.height))
        grey = np.asarray(picture.resize((width, 64), Image.Resampling.BICUBIC), np.float32) / 127.5 - 1
        grey = np.pad(grey, ((0, 0), (0, 256 - width)), "edge")
        grey += draw.normal(0, draw.uniform(0, 0.2), grey.shape)
        pictures.append(grey.clip(-1, 1))
    return torch.tensor(np.stack(pictures), dtype=torch.float32).unsqueeze(1), texts
