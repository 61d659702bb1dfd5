"""Measure inference on integers: exported files in onnxruntime, converted convolutions in torch."""

from __future__ import annotations

import copy
import importlib.util
import logging
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
import transformers
from measure import Row, interleaved, main, milliseconds, ratio
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from shared_core import Recipe, Session
from shared_core.quantization import convert, quantize
from shared_core.tools.export import export_onnx
from shared_core.tools.export.onnx_files import onnxruntime_sums_exactly

GOAL = 1 / 3  # of the float model's time


def linear_net(width: int) -> tuple[nn.Module, Tensor]:
    net = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    return net, torch.randn(64, width)


def conv_net(width: int) -> tuple[nn.Module, Tensor]:
    layers: list[nn.Module] = []
    for before, after in ((3, width), (width, width), (width, 2 * width), (2 * width, 2 * width)):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10))
    return net, torch.randn(8, 3, 32, 32)


class Block(nn.Module):
    """Two convolutions with batch norm around which the input goes."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(after) for _ in range(2))
        self.side = nn.Identity() if before == after else nn.Conv2d(before, after, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.second(y)) + self.side(x))


def residual_net(width: int, size: int, batch: int) -> tuple[nn.Module, Tensor]:
    stem = nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
    blocks = Block(width, width, 1), Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 2 * width, 1)
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10)
    return nn.Sequential(*stem, *blocks, *head), torch.randn(batch, 3, size, size)


def quantized(model: nn.Module, *x: Tensor) -> nn.Module:
    session = Session(Recipe.from_dict({"qat": {"scheme": "int8"}}))
    session.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    session.begin([optimizer], total_steps=1)
    session.loss(model(*x).square().mean()).backward()
    session.before_step()
    optimizer.step()
    session.after_step()
    return model.eval()


def session_of(file: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def export(name: str, model: nn.Module, x: Tensor, rounds: int, calibrate: bool = False) -> Row:
    with tempfile.TemporaryDirectory(prefix="eff-bench-") as folder:
        plain, integer = Path(folder) / "plain.onnx", Path(folder) / "integer.onnx"
        program: Any = torch.onnx.export(model.eval(), (x,), dynamo=True, opset_version=21, verbose=False)
        program.save(plain)
        calibration = [x] if calibrate else None
        report = export_onnx(quantized(model.train(), x), x, integer, calibration=calibration)
        sizes = plain.stat().st_size, integer.stat().st_size
        calls = {}
        for variant, file in (("float", plain), ("int8", integer)):
            opened = session_of(file)
            feed = {opened.get_inputs()[0].name: x.numpy()}
            calls[variant] = lambda opened=opened, feed=feed: opened.run(None, feed)
        times = interleaved(calls, rounds=rounds, calls=5, warmup=3)
    kernels = ", ".join(f"{count} {kind}" for kind, count in report.integer_nodes.items())
    gain = ratio(times, "int8", "float")
    promised = calibrate or "Linear" in name
    return Row(
        f"int8 ONNX file of a {name} in onnxruntime (float: {milliseconds(times, 'float')})",
        f"{milliseconds(times, 'int8')}; {kernels}",
        "the float model in onnxruntime",
        gain.text(),
        f"file {sizes[1]} of {sizes[0]} bytes: {sizes[1] / sizes[0]:.2f}",
        f"at most {GOAL:.2f}" if promised else "",
        gain.median <= GOAL if promised else None,
    )


class Encoder(nn.Module):
    """BERT's logits as a tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": 4, "num_attention_heads": 4}
        self.bert = BertForSequenceClassification(BertConfig(vocab_size=4000, **sizes))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.bert(input_ids, attention_mask).logits
        return logits


def open_length(width: int, rounds: int) -> Row:
    def texts(length: int, padded: int) -> tuple[Tensor, Tensor]:
        mask = torch.zeros(8, padded, dtype=torch.long)
        mask[:, :length] = 1
        return torch.randint(1, 4000, (8, padded)) * mask, mask

    long, short = 96, 24
    model = quantized(Encoder(width).train(), *texts(long, long))
    with tempfile.TemporaryDirectory(prefix="eff-bench-") as folder:
        calls = {}
        for kind in ("open", "fixed"):
            file = Path(folder) / f"{kind}.onnx"
            export_onnx(model, texts(long, long), file, dynamic_length=kind == "open")
            opened = session_of(file)
            for length in (long, short):
                given = texts(length, length if kind == "open" else long)
                feed = {i.name: value.numpy() for i, value in zip(opened.get_inputs(), given, strict=True)}
                calls[f"{kind}, {length}"] = lambda opened=opened, feed=feed: opened.run(None, feed)
        times = interleaved(calls, rounds=rounds, calls=3, warmup=3)
    return Row(
        f"8 texts of {short} tokens in an int8 ONNX encoder of open length, 4 layers of {width}",
        milliseconds(times, f"open, {short}"),
        f"padded to the {long} of a fixed length: {milliseconds(times, f'fixed, {short}')}",
        ratio(times, f"open, {short}", f"fixed, {short}").text(),
        f"{long} tokens: open {milliseconds(times, f'open, {long}')}, fixed {milliseconds(times, f'fixed, {long}')}",
    )


class _Batches:
    """Calibration batches as onnxruntime's quantizer reads them."""

    def __init__(self, *batches: dict[str, Any]) -> None:
        self.left = list(batches)

    def get_next(self) -> dict[str, Any] | None:
        return self.left.pop() if self.left else None


def encoder(batches: tuple[int, ...], rounds: int, **sizes: int) -> list[Row]:
    """Return rows of a BERT: int8 by `export_onnx` beside onnxruntime's own quantizers of the float file."""
    import onnx
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_dynamic, quantize_static

    model = BertForSequenceClassification(BertConfig(**sizes)).eval()

    def texts(batch: int) -> dict[str, Tensor]:
        ids = torch.randint(1, model.config.vocab_size, (batch, 128))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    with tempfile.TemporaryDirectory(prefix="eff-bench-") as folder:
        files = {name: Path(folder) / f"{name}.onnx" for name in ("float", "int8", "tokens", "static", "dynamic")}
        program: Any = torch.onnx.export(
            model,
            kwargs=texts(2),
            dynamo=True,
            opset_version=21,
            verbose=False,
            dynamic_shapes={name: {0: torch.export.Dim("batch")} for name in texts(2)},
        )
        program.save(files["float"])
        plain = onnx.load(files["float"])
        del plain.graph.value_info[:]  # of torch 2.13, which onnxruntime's quantizer finds to be wrong
        onnx.save(plain, files["float"])
        calibration = _Batches({name: value.numpy() for name, value in texts(2).items()})
        options: Any = {"per_channel": True, "weight_type": QuantType.QInt8}
        quantize_dynamic(files["float"], files["dynamic"], **options)
        options |= {"activation_type": QuantType.QUInt8, "op_types_to_quantize": ["MatMul"]}
        quantize_static(files["float"], files["static"], calibration, quant_format=QuantFormat.QDQ, **options)
        export_onnx(quantize(copy.deepcopy(model), "int8_dynamic"), texts(2), files["tokens"])
        integer = quantize(model, "int8", [texts(2)])
        begun = time.process_time()
        report = export_onnx(integer, texts(2), files["int8"])
        seconds = time.process_time() - begun
        sessions = {name: session_of(file) for name, file in files.items()}
        rows = []
        for batch in batches:
            feed = {name: value.numpy() for name, value in texts(batch).items()}
            calls = {name: lambda opened=opened, feed=feed: opened.run(None, feed) for name, opened in sessions.items()}
            times = interleaved(calls, rounds=rounds, calls=1, warmup=1)
            peers = [ratio(times, name, "float") for name in ("static", "dynamic")]
            gain = ratio(times, "int8", "float")
            rows.append(
                Row(
                    f"int8 BERT{sizes or '-base'}, {batch} of 128 tokens, in onnxruntime "
                    f"(float: {milliseconds(times, 'float')})",
                    f"{milliseconds(times, 'int8')}; {report.integer_nodes}; exported in {seconds:.1f} s; int8_dynamic "
                    f"{milliseconds(times, 'tokens')} ({ratio(times, 'tokens', 'float').text()}; of quantize_dynamic "
                    f"{ratio(times, 'tokens', 'dynamic').text()})",
                    f"onnxruntime's quantize_static {milliseconds(times, 'static')} ({peers[0].text()}), "
                    f"quantize_dynamic {milliseconds(times, 'dynamic')} ({peers[1].text()})",
                    gain.text(),
                    f"file {files['int8'].stat().st_size} of {files['float'].stat().st_size} bytes",
                    "less than both",
                    gain.median <= min(peer.median for peer in peers),
                )
            )
    return rows


def vision_nets() -> dict[str, nn.Module]:
    """Return nets of transformers with random weights: five kinds of blocks."""
    kinds = {
        "ResNet": (transformers.ResNetForImageClassification, transformers.ResNetConfig(
            embedding_size=32, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic")),
        "MobileNetV2": (transformers.MobileNetV2ForImageClassification, transformers.MobileNetV2Config()),
        "EfficientNet": (transformers.EfficientNetForImageClassification, transformers.EfficientNetConfig(
            width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280)),
        "ConvNeXt": (transformers.ConvNextForImageClassification, transformers.ConvNextConfig(
            hidden_sizes=[40, 80, 160, 320], depths=[2, 2, 6, 2])),
        "RegNet": (transformers.RegNetForImageClassification, transformers.RegNetConfig(
            embedding_size=32, hidden_sizes=[64, 128, 256, 512], depths=[1, 2, 4, 1], groups_width=16)),
    }  # fmt: skip
    nets = {name: build(config) for name, (build, config) in kinds.items()}
    for net in nets.values():
        for module in net.modules():
            if isinstance(
                module, nn.BatchNorm2d
            ):  # the statistics of a batch: values would vanish with the initial ones
                nn.init.ones_(module.weight)
                module.momentum = None
        net.train()(torch.randn(8, 3, 64, 64))
        net.eval()
    return nets


def by_onnxruntime(plain: Path, file: Path, batch: dict[str, Any], bits: int) -> None:
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    quantize_static(
        plain, file, _Batches(batch), quant_format=QuantFormat.QDQ, per_channel=True,
        activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8, reduce_range=bits == 7,
    )  # fmt: skip


def by_nncf(plain: Path, file: Path, batch: dict[str, Any], bits: int) -> None:
    import nncf
    import onnx

    onnx.save(nncf.quantize(onnx.load(plain), nncf.Dataset([batch]), subset_size=1), file)


def by_modelopt(plain: Path, file: Path, batch: dict[str, Any], bits: int) -> None:
    inputs = plain.with_suffix(".npz")
    np.savez(inputs, **batch)
    program = [sys.executable, "-m", "modelopt.onnx.quantization"]  # which changes onnxruntime in its process
    options = [f"--onnx_path={plain}", f"--calibration_data_path={inputs}", f"--output_path={file}"]
    where = ["--quantize_mode=int8", "--calibration_eps", "cpu", "--high_precision_dtype=fp32"]
    subprocess.run([*program, *options, *where], check=True, capture_output=True)


PEERS = {"onnxruntime": by_onnxruntime, "nncf": by_nncf, "modelopt": by_modelopt}
"""Module → how it quantizes a file. `pip install nncf nvidia-modelopt[onnx]` adds two; only onnxruntime's is required.
modelopt writes files for TensorRT."""


def vision(name: str, model: nn.Module, size: int, rounds: int) -> Row:
    """Compare a quantized net with its float file, and with that file quantized by other libraries."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    x = torch.randn(4, 3, size, size)
    batch: dict[str, Any] = {"pixel_values": x.numpy()}
    bits = 8 if onnxruntime_sums_exactly() else 7  # products of 8-bit weights saturate without VNNI
    peers = {module: write for module, write in PEERS.items() if importlib.util.find_spec(module)}
    with tempfile.TemporaryDirectory(prefix="eff-bench-") as folder:
        files = {kind: Path(folder) / f"{kind}.onnx" for kind in ("float", "int8", *peers)}
        export_onnx(model, {"pixel_values": x}, files["float"])
        scheme = {"scheme": "int8", "weight_bits": bits}
        integer = quantize(copy.deepcopy(model), scheme, [{"pixel_values": x}])
        export_onnx(integer, {"pixel_values": x}, files["int8"], calibration=[{"pixel_values": x}])
        prepared = Path(folder) / "prepared.onnx"
        quant_pre_process(files["float"], prepared, skip_symbolic_shape=True)
        for module, write in peers.items():
            write(prepared, files[module], batch, bits)
        feed = {"pixel_values": x[:1].numpy()}
        sessions = {kind: session_of(file) for kind, file in files.items()}
        calls = {kind: lambda opened=opened: opened.run(None, feed) for kind, opened in sessions.items()}
        times = interleaved(calls, rounds=rounds, calls=2, warmup=2)
        exact = calls["float"]()[0]
        quality = {
            k: f"{10 * np.log10((exact**2).mean() / ((calls[k]()[0] - exact) ** 2).mean()):.0f} dB" for k in calls
        }
        sizes = {kind: f"{file.stat().st_size / 1e6:.1f} MB" for kind, file in files.items()}
    to_float, to_peers = ratio(times, "int8", "float"), {module: ratio(times, "int8", module) for module in peers}
    return Row(
        f"int8 {name}, {bits}-bit weights, one image of {size} pixels (float: {milliseconds(times, 'float')})",
        f"{milliseconds(times, 'int8')}, {quality['int8']}",
        "; ".join(f"{module} {milliseconds(times, module)}, {quality[module]}" for module in peers),
        f"{to_float.text()} of float; {'; '.join(f'{to.text()} of {module}' for module, to in to_peers.items())}",
        ", ".join(f"{kind} {size}" for kind, size in sizes.items()),
        "faster than float, at most 1.05 of each",
        to_float.median < 1 and max(to.median for to in to_peers.values()) <= 1.05,
    )


def converted(name: str, model: nn.Module, x: Tensor, rounds: int) -> Row:
    integer = convert(quantize(model, "int8", [x]), backend="torchao")
    models: dict[str, Any] = {"float": model.eval(), "bf16": copy.deepcopy(model).eval().bfloat16(), "int8": integer}
    calls = {}
    x = x.contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        for variant, own in list(models.items()):
            own.to(memory_format=torch.channels_last)
            models[f"{variant}, compiled"] = torch.compile(copy.deepcopy(own), options={"freezing": True})
        for variant, own in models.items():
            inputs = x.bfloat16() if "bf16" in variant else x
            calls[variant] = lambda own=own, inputs=inputs: own(inputs)
        times = interleaved(calls, rounds=rounds, calls=3, warmup=3)
    gain = ratio(times, "int8, compiled", "float, compiled")
    others = [f"{variant} {milliseconds(times, variant)}" for variant in models if "int8" not in variant]
    return Row(
        f"int8 {name} in torch: convert(backend='torchao'), convolutions on oneDNN",
        f"{milliseconds(times, 'int8')}; compiled {milliseconds(times, 'int8, compiled')}",
        "; ".join(others),
        f"{gain.text()} (both compiled)",
        "",
        "less than bf16, compiled",
        ratio(times, "int8, compiled", "bf16, compiled").median < 1,
    )


def measure(quick: bool, more: int = 0) -> list[Row]:
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    width, channels, rounds = (128, 8, 2) if quick else (1024, 64, 9)
    convolutions = f"net of 4 Conv2d with batch norm, {channels} to {2 * channels} channels, batch 8 of 32x32"
    rows = [
        export(f"net of 3 Linear({width}), batch 64", *linear_net(width), rounds),
        *([export(f"{convolutions}, without calibration", *conv_net(channels), rounds)] if more else []),
        export(f"{convolutions}, with calibration", *conv_net(channels), rounds, True),
        open_length(32 if quick else 256, rounds),
    ]
    if more:
        sizes = {"num_hidden_layers": 3, "hidden_size": 48, "intermediate_size": 96} if quick else {}
        rows += encoder((1, 8), rounds, **sizes)
    shapes = ((channels, 56, 1), (channels, 28, 16), (4 * channels, 28, 1))
    for number, (wide, size, batch) in enumerate(shapes[: None if more else 1]):
        residual = f"residual net of 10 Conv2d, {wide} to {2 * wide} channels, batch {batch} of {size}x{size}"
        if more and number == 0:
            rows.append(export(f"{residual}, without calibration", *residual_net(wide, size, batch), rounds))
        rows.append(export(f"{residual}, with calibration", *residual_net(wide, size, batch), rounds, True))
        rows.append(converted(residual, *residual_net(wide, size, batch), rounds))
    nets = vision_nets() if more else {}
    return rows + [vision(name, net, 32 if quick else 128, rounds) for name, net in nets.items()]


if __name__ == "__main__":
    main(measure, more=0)
