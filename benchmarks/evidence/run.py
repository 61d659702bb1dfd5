"""Compress four pretrained networks with ``eff``, beside a peer: ``python benchmarks/evidence/run.py [NAME ...]``.

Every command is printed and run as a user runs it; a run that was cut off goes on. Each case rewrites its section of
``benchmarks/results/evidence.md``, of which docs/results.md shows a part. Needs the packages that the Makefile names.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import numpy as np
import pictures
import sound
import summary
import torch
from models import MADE
from torch import Tensor, nn
from torch.nn import functional

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from measure import RESULTS, Runs, Spread, interleaved, measured_on, write_sections  # noqa: E402

TEST = 1024
"""Frames of tones that CREPE is tested on, and lines that EasyOCR's network reads."""
TAUGHT, HEALED = 4, 4
"""Epochs of the distillations."""
HEAD = """\
# Pretrained networks

Networks that Python packages ship, compressed by this library and by a peer. ± is one standard error. Milliseconds are
CPU time of one call, with quartiles. `make evidence` writes this page, `python benchmarks/evidence/run.py NAME` one
section. The sounds and pictures are made for the test, so compare rows with each other, not with published figures."""


def eff(command: str) -> None:
    """Run a command of ``eff`` in this folder; ``made/`` is that of results, its last word. One that is done stays."""
    words = shlex.split(command.replace("made/", f"{MADE}/"))
    out = Path(words[-1])
    if (out / "model.safetensors" if words[0] == "run" else out).exists():
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
    """Write what onnxruntime's own static quantizer makes of a float file: per channel, QDQ, after its preparation."""
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


def peer_lstm(source: str, file: str) -> None:
    """Write a file whose LSTM layers onnxruntime's dynamic quantizer has put into an operator of its own."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(
        MADE / source, MADE / file, op_types_to_quantize=["LSTM"], per_channel=True, weight_type=QuantType.QInt8
    )


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


def int8(model: str, calibration: str, out: str, options: str = "") -> str:
    """Quantize a model to static int8 and export it, by two commands; return the file's name."""
    eff(f"quantize models:{model} --scheme int8 --calibration models:{calibration}{options} --out made/{out}")
    eff(f"export models:{model} --weights made/{out} --out made/{out}.onnx")
    return f"{out}.onnx"


def right(call: Callable[..., Any], count: int = TEST) -> dict[str, Any]:
    """Return the share of frames whose pitch a network tells, with its standard error."""
    frames, hertz = sound.tones(TEST, torch.Generator().manual_seed(2))
    with torch.no_grad():
        found = [call(part) for part in frames[:count].split(32)]
    logits = torch.cat([each["logits"] if isinstance(each, dict) else each[0] for each in found])
    share = models.right_pitches(logits, hertz[:count]).float()
    return {"quality": f"{100 * share.mean():.1f} ± {100 * models.standard_error(share):.1f} %"}


def pitch() -> dict[str, Any]:
    """Static int8 of CREPE tiny: two commands beside onnxruntime's quantizer, on the same float weights and batches."""
    eff("export models:crepe_tiny --out made/crepe-tiny.onnx")
    ours = int8("crepe_tiny", "pitch_calibration", "crepe-int8")
    files = {"float": "crepe-tiny.onnx", "ours": ours, "peer": "crepe-peer.onnx"}
    peer_static(files["float"], files["peer"], models.pitch_calibration())
    found = timed(files, *(each[:1] for each in models.crepe_tiny()[1]))
    return {each: found[each] | right(onnx(file)) for each, file in files.items()}


def peer_taught(model: nn.Module, epochs: int) -> nn.Module:
    """Return a network trained by a plain loop of torch: the same frames, teacher's outputs, loss and optimizer."""
    from shared_core.distillation.teacher_cache import TeacherCache

    torch.manual_seed(42)  # Trainer's
    frames = models.pitch_training()["frames"][:]
    told = TeacherCache.open(MADE / "crepe-teacher").lookup({"frames": frames})
    wanted = torch.zeros(len(frames), 360).scatter_(1, told.indices.long(), told.log_probs.float())
    steps = epochs * len(frames) // models.BATCH
    optimizer = torch.optim.AdamW(model.parameters(), models.RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    model.train()
    for _ in range(epochs):
        for chosen in torch.randperm(len(frames)).split(models.BATCH):
            log_probs = model(frames[chosen])["logits"].log_softmax(-1)
            loss = functional.kl_div(log_probs, wanted[chosen], reduction="batchmean", log_target=True)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return model.eval()


def peer_half() -> nn.Module:
    """Return CREPE tiny in half its channels, as Torch-Pruning cuts it by magnitude."""
    import torch_pruning

    model, inputs = models.crepe_tiny()
    importance = torch_pruning.importance.GroupMagnitudeImportance(p=2)
    torch_pruning.pruner.MagnitudePruner(
        model, inputs, importance, pruning_ratio=0.5, ignored_layers=[model.classifier]
    ).step()
    return model


def distill(model: str, epochs: int, out: str) -> None:
    """Train a pitch tracker from what the teacher told, by flags of ours to a script that knows no teacher."""
    flags = "--distill_teacher cache:made/crepe-teacher --distill_temperature 1 --distill_alpha 0"
    eff(f"run train_pitch.py --model models:{model} --num_train_epochs {epochs} {flags} --output_dir made/{out}")


def taught() -> dict[str, Any]:
    """CREPE full as the teacher of tiny; the peer is a plain loop of torch. The teacher is judged on 256 frames."""
    eff("cache-teacher models:crepe_full --data models:pitch_training --temperature 1 --out made/crepe-teacher")
    distill("crepe_tiny", TAUGHT, "crepe-taught")
    files = {"taught, int8": int8("crepe_taught", "pitch_calibration", "crepe-taught-int8")}
    times = timed(files, *(each[:1] for each in models.crepe_tiny()[1]))
    return {
        "full, the teacher": right(models.crepe_full(), 256),
        "tiny, as published": right(models.crepe_tiny()[0]),
        "taught": right(models.crepe_taught()[0]),
        **{each: times[each] | right(onnx(file)) for each, file in files.items()},
        "peer: taught": right(peer_taught(models.crepe_tiny()[0], TAUGHT)),
    }


def halved() -> dict[str, Any]:
    """CREPE tiny cut to half its channels, healed by the same teacher; the peer is Torch-Pruning and a plain loop."""
    eff("cache-teacher models:crepe_full --data models:pitch_training --temperature 1 --out made/crepe-teacher")
    eff("prune models:crepe_tiny --sparsity 0.5 --granularity channel --shrink --out made/crepe-half")
    distill("crepe_half", HEALED, "crepe-healed")
    eff("export models:crepe_tiny --out made/crepe-tiny.onnx")
    eff("export models:crepe_healed --out made/crepe-healed.onnx")
    files = {
        "tiny, as published": "crepe-tiny.onnx",
        "half, healed": "crepe-healed.onnx",
        "half, healed, int8": int8("crepe_healed", "pitch_calibration", "crepe-healed-int8"),
    }
    times = timed(files, *(each[:1] for each in models.crepe_tiny()[1]))
    found = {each: times[each] | right(onnx(file)) for each, file in files.items()}
    found["half, not healed"] = right(models.crepe_half()[0])
    cut = peer_half()
    found["peer: half, not healed"] = right(cut)
    found["peer: half, healed"] = right(peer_taught(cut, HEALED))
    return found


def voices() -> dict[str, Any]:
    """Quantized LSTM of the speaker encoder, as files, beside torch's and onnxruntime's dynamic quantization."""
    model, _ = models.voice_encoder()
    mel, who = models.utterances()
    eff("export models:voice_encoder --out made/voice.onnx")
    files = {"float": "voice.onnx"}
    for scheme in ("int8_weight", "int4_weight", "int8_dynamic"):
        eff(f"quantize models:voice_encoder --scheme {scheme} --out made/voice-{scheme}")
        eff(f"export models:voice_encoder --weights made/voice-{scheme} --out made/voice-{scheme}.onnx")
        files[scheme] = f"voice-{scheme}.onnx"
    from onnxruntime.quantization.shape_inference import quant_pre_process

    files["peer: onnxruntime"] = "voice-peer.onnx"
    quant_pre_process(str(MADE / "voice.onnx"), str(MADE / "prepared-voice.onnx"), skip_symbolic_shape=True)
    peer_lstm("prepared-voice.onnx", files["peer: onnxruntime"])
    dynamic = torch.ao.quantization.quantize_dynamic
    peer = dynamic(models.voice_encoder()[0], {nn.LSTM, nn.Linear}, dtype=torch.qint8)
    found = timed(files, mel[:1]) | {"peer: torch": {}}
    with torch.no_grad():
        whole = model(mel)
        embeddings = {name: onnx(file)(mel)[0] for name, file in files.items()} | {"peer: torch": peer(mel)}
    for name, each in embeddings.items():
        likeness = (each * whole).sum(1)
        rate = models.equal_error_rate(each, who)
        without = [models.equal_error_rate(each[who != k], who[who != k]) for k in range(len(sound.VOICES))]
        # jackknife over voices
        error = ((len(without) - 1) ** 2 / len(without)) ** 0.5 * float(np.std(without, ddof=1))
        found[name] |= {
            "cosine": f"{likeness.mean():.5f} ± {likeness.std() / len(likeness) ** 0.5:.5f}",
            "quality": f"{100 * rate:.2f} ± {100 * error:.2f} %",
        }
    return found


def detector() -> dict[str, Any]:
    """Static int8 of Silero VAD, its transform left in float or not, beside onnxruntime's quantizer."""
    eff("export models:silero --out made/silero.onnx")
    files = {
        "float": "silero.onnx",
        "ours": int8("silero", "speech_calibration", "silero-int8", " --skip stft_conv"),
        "ours, transform too": int8("silero", "speech_calibration", "silero-int8-all"),
        "peer": "silero-peer.onnx",
    }
    peer_static(files["float"], files["peer"], models.speech_calibration())
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


def lines() -> dict[str, Any]:
    """Static int8 of EasyOCR's reader of lines, its LSTM too or in float, beside onnxruntime's quantizers."""
    eff("export models:reader --out made/reader.onnx")
    files = {
        "float": "reader.onnx",
        "ours": int8("reader", "line_calibration", "reader-int8"),
        "ours, LSTM in float": int8("reader", "line_calibration", "reader-int8-rnn", " --skip *.rnn"),
        "peer": "reader-peer.onnx",
        "peer, LSTM in float": "reader-peer-rnn.onnx",
    }
    peer_static(files["float"], files["peer, LSTM in float"], models.line_calibration())
    peer_lstm(files["peer, LSTM in float"], files["peer"])
    seen, texts = pictures.lines(TEST, seed=2)
    found = timed(files, seen[:1])
    for each, file in files.items():
        call = onnx(file)
        read = models.right_lines(torch.cat([call(part)[0] for part in seen.split(32)]), texts)
        found[each] |= {"quality": f"{100 * read.float().mean():.1f} ± {100 * models.standard_error(read):.1f} %"}
    return found


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    MADE.mkdir(parents=True, exist_ok=True)
    runs = Runs(MADE / "measured.jsonl")
    cases = {
        "silero": detector,
        "voices": voices,
        "reader": lines,
        "crepe-tiny": pitch,
        "crepe-half": halved,
        "crepe-taught": taught,
    }
    chosen = sys.argv[1:] or list(cases)
    if unknown := [name for name in chosen if name not in cases]:
        sys.exit(f"evidence: names must be of {', '.join(cases)}, got {', '.join(unknown)}")
    sections = {}
    for name in chosen:
        found = runs.of(name, lambda name=name: {"on": measured_on(), "rows": cases[name]()})
        keys = list(dict.fromkeys(key for values in found["rows"].values() for key in values))
        table = ["| | " + " | ".join(keys) + " |", "|---" * (len(keys) + 1) + "|"]
        for row, values in found["rows"].items():
            table.append(f"| {row} | " + " | ".join(str(values.get(key, "")) for key in keys) + " |")
        print("\n".join(table), flush=True)
        sections[name] = "\n\n".join([found["on"], str(cases[name].__doc__), "\n".join(table)])
    print(f"wrote {write_sections(RESULTS / 'evidence.md', HEAD, sections, list(cases))}")
    summary.write()


if __name__ == "__main__":
    main()
