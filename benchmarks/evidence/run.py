"""Compress three pretrained networks with ``eff``, beside a peer: ``python benchmarks/evidence/run.py``.

Every command is printed and run as a user runs it; a run that was cut off goes on. Writes the tables into
``benchmarks/results/``. Needs ``torchcrepe``, ``resemblyzer``, ``silero-vad`` and ``espeakng-loader``.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import numpy as np
import sound
import torch
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from measure import RESULTS, Runs, Spread, device, interleaved, today, versions  # noqa: E402

MADE = HERE.parents[1] / "runs" / "evidence"
TEST = 1024
"""Frames of tones that CREPE is tested on."""


def eff(command: str) -> None:
    """Run a command of ``eff`` in this folder; ``made/`` in it is the folder of results. One that is done stays."""
    words = shlex.split(command.replace("made/", f"{MADE}/"))
    if Path(words[words.index("--out") + 1]).exists():
        return
    print(f"$ eff {command}", flush=True)
    subprocess.run([Path(sys.executable).parent / "eff", *words], cwd=HERE, check=True, stdout=subprocess.DEVNULL)


def session(file: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def onnx(file: str) -> Callable[..., list[Tensor]]:
    """Return an ONNX file as a function of tensors."""
    loaded = session(MADE / file)
    names = [each.name for each in loaded.get_inputs()]

    def call(*inputs: Tensor) -> list[Tensor]:
        given = dict(zip(names, (each.numpy() for each in inputs), strict=True))
        return [torch.from_numpy(each) for each in loaded.run(None, given)]

    return call


def peer_static(source: str, file: str, batches: list[Any]) -> None:
    """Write what onnxruntime's own static quantiser makes of a float file: per channel, QDQ, after its preparation."""
    if (MADE / file).exists():
        return
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    prepared = MADE / f"prepared-{source}"
    quant_pre_process(str(MADE / source), str(prepared))
    names = [each.name for each in session(prepared).get_inputs()]

    class Batches(CalibrationDataReader):  # type: ignore[misc]
        left = iter(batches)

        def get_next(self) -> dict[str, np.ndarray] | None:
            batch = next(self.left, None)
            if batch is None:
                return None
            given = (batch,) if isinstance(batch, Tensor) else batch
            return {name: each.numpy() for name, each in zip(names, given, strict=True)}

    quantize_static(
        str(prepared), str(MADE / file), Batches(), per_channel=True, weight_type=QuantType.QInt8,
        activation_type=QuantType.QUInt8,
    )  # fmt: skip


def timed(files: dict[str, str], *inputs: Tensor) -> dict[str, dict[str, Any]]:
    """Return bytes and milliseconds of one call, with quartiles, of each file."""
    calls = {name: onnx(file) for name, file in files.items()}
    times = interleaved({name: lambda call=call: call(*inputs) for name, call in calls.items()}, rounds=15, calls=3)
    return {
        name: {
            "bytes": (MADE / file).stat().st_size,
            "ms": Spread.of([1e3 * each for each in times[name]]).text(),
        }
        for name, file in files.items()
    }


def pitch() -> dict[str, Any]:
    """Static int8 of CREPE tiny: two commands beside onnxruntime's quantiser, on the same float weights and batches."""
    name = "crepe-tiny"
    eff(f"export models:crepe_tiny --out made/{name}.onnx")
    eff(f"quantize models:crepe_tiny --scheme int8 --calibration models:pitch_calibration --out made/{name}-int8")
    eff(f"export models:crepe_tiny --weights made/{name}-int8 --out made/{name}-int8.onnx")
    peer_static(f"{name}.onnx", f"{name}-peer.onnx", models.pitch_calibration())
    files = {"float": f"{name}.onnx", "ours": f"{name}-int8.onnx", "peer": f"{name}-peer.onnx"}
    frames, hertz = sound.tones(TEST, torch.Generator().manual_seed(2))
    found = timed(files, frames[:1])
    for each, file in files.items():
        call = onnx(file)
        right = models.right_pitches(torch.cat([call(part)[0] for part in frames.split(32)]), hertz).float()
        found[each] |= {"quality": f"{100 * right.mean():.1f} ± {100 * models.standard_error(right):.1f} %"}
    return found


def voices() -> dict[str, Any]:
    """Quantised LSTM of the speaker encoder, beside torch's dynamic quantisation of the same weights."""
    from shared_core.cli.quantized_models import load_quantized

    model, _ = models.voice_encoder()
    mel, who = models.utterances()
    with torch.no_grad():
        whole = model(mel)
    made: dict[str, tuple[nn.Module, int]] = {}
    for scheme in ("int8_dynamic", "int8_weight", "int4_weight"):
        eff(f"quantize models:voice_encoder --scheme {scheme} --out made/voice-{scheme}")
        ours, _ = models.voice_encoder()
        folder = MADE / f"voice-{scheme}"
        load_quantized(ours, folder)
        report = json.loads((folder / "eff_quantization.json").read_text())
        made[scheme] = (ours, report["bytes"]["quantized"])
    peer, _ = models.voice_encoder()
    peer = torch.ao.quantization.quantize_dynamic(peer, {nn.LSTM, nn.Linear}, dtype=torch.qint8)
    found = {}
    for name, each in {"float": model, **{k: v[0] for k, v in made.items()}, "peer": peer}.items():
        with torch.no_grad():
            embeddings = each(mel)
        likeness = (embeddings * whole).sum(1)
        rate = models.equal_error_rate(embeddings, who)
        without = [models.equal_error_rate(embeddings[who != k], who[who != k]) for k in range(len(sound.VOICES))]
        error = ((len(without) - 1) ** 2 / len(without)) ** 0.5 * float(
            np.std(without, ddof=1)
        )  # jackknife over voices
        found[name] = {
            "cosine": f"{likeness.mean():.5f} ± {likeness.std() / len(likeness) ** 0.5:.5f}",
            "quality": f"{100 * rate:.2f} ± {100 * error:.2f} %",
        }
        if name in made:
            found[name]["bytes of codes"] = made[name][1]
    return found


def detector() -> dict[str, Any]:
    """Static int8 of Silero VAD, with its transform left in float, beside onnxruntime's quantiser."""
    eff("export models:silero --out made/silero.onnx")
    eff(
        "quantize models:silero --scheme int8 --calibration models:speech_calibration --set skip=stft_conv "
        "--out made/silero-int8"
    )
    eff("export models:silero --weights made/silero-int8 --out made/silero-int8.onnx")
    peer_static("silero.onnx", "silero-peer.onnx", models.speech_calibration())
    files = {"float": "silero.onnx", "ours": "silero-int8.onnx", "peer": "silero-peer.onnx"}
    audio, truth = map(torch.stack, zip(*sound.scenes(20, torch.Generator().manual_seed(2)), strict=True))
    frames = models.frames_of(audio)
    found = timed(files, *(each[:1] for each in models.speech_calibration()[0]))
    for each, file in files.items():
        call, state, heard = onnx(file), [torch.zeros(20, 128)] * 2, []
        for frame in frames.unbind(1):
            score, *state = call(frame.contiguous(), *state)
            heard.append(score)
        areas = [models.area(a, b) for a, b in zip(torch.cat(heard, 1), truth, strict=True)]
        found[each] |= {"quality": f"{np.mean(areas):.4f} ± {np.std(areas, ddof=1) / 20**0.5:.4f}"}
    return found


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    MADE.mkdir(parents=True, exist_ok=True)
    runs = Runs(MADE / "results.jsonl")
    cases = {"silero": detector, "voices": voices, "crepe-tiny": pitch}
    chosen = sys.argv[1:] or list(cases)
    text = [f"# Pretrained networks\n\n{device()}, {today()}, torch {versions()['torch']}.\n"]
    for name in chosen:
        found = runs.of(name, cases[name])
        keys = list(dict.fromkeys(key for values in found.values() for key in values))
        text.append(f"## {name}\n\n{cases[name].__doc__}\n")
        text += ["| | " + " | ".join(keys) + " |", "|---" * (len(keys) + 1) + "|"]
        for row, values in found.items():
            text.append(f"| {row} | " + " | ".join(str(values.get(key, "")) for key in keys) + " |")
        text.append("")
        print("\n".join(text[-len(found) - 2 :]), flush=True)
    if not sys.argv[1:]:
        (RESULTS / f"{today()}-evidence.md").write_text("\n".join(text))


if __name__ == "__main__":
    main()
