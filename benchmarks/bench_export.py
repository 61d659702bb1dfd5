"""What exporting a quantised model to ONNX gains: file and latency beside the float model's, both in onnxruntime."""

from __future__ import annotations

import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from measure import Row, interleaved, main, milliseconds, ratio
from torch import Tensor, nn

from shared_core import Recipe, Session
from shared_core.quantization import export_onnx


def linear_net(width: int) -> tuple[nn.Module, Tensor]:
    net = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    return net, torch.randn(64, width)


def conv_net(width: int) -> tuple[nn.Module, Tensor]:
    layers: list[nn.Module] = []
    for before, after in ((3, width), (width, width), (width, 2 * width), (2 * width, 2 * width)):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10))
    return net, torch.randn(8, 3, 32, 32)


def quantized(model: nn.Module, x: Tensor) -> nn.Module:
    session = Session(Recipe.from_dict({"qat": {"scheme": "int8"}}))
    session.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    session.begin([optimizer], total_steps=1)
    session.loss(model(x).square().mean()).backward()
    session.before_optimizer_step()
    optimizer.step()
    session.after_optimizer_step()
    return model.eval()


def session_of(file: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def export(name: str, model: nn.Module, x: Tensor, rounds: int) -> Row:
    with tempfile.TemporaryDirectory(prefix="eff-bench-") as folder:
        plain, integer = Path(folder) / "plain.onnx", Path(folder) / "integer.onnx"
        program: Any = torch.onnx.export(model.eval(), (x,), dynamo=True, opset_version=21, verbose=False)
        program.save(plain)
        report = export_onnx(quantized(model.train(), x), x, integer)
        sizes = plain.stat().st_size, integer.stat().st_size
        calls = {}
        for variant, file in (("float", plain), ("int8", integer)):
            opened = session_of(file)
            feed = {opened.get_inputs()[0].name: x.numpy()}
            calls[variant] = lambda opened=opened, feed=feed: opened.run(None, feed)
        times = interleaved(calls, rounds=rounds, calls=5, warmup=3)
    kernels = ", ".join(f"{count} {kind}" for kind, count in report.integer_nodes.items())
    return Row(
        f"int8 ONNX file of a {name} in onnxruntime (float: {milliseconds(times, 'float')})",
        f"{milliseconds(times, 'int8')}; {kernels}",
        "the float model in onnxruntime",
        ratio(times, "int8", "float").text(),
        f"file {sizes[1]} of {sizes[0]} bytes: {sizes[1] / sizes[0]:.2f}",
    )


def measure(quick: bool) -> list[Row]:
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    width, channels, rounds = (128, 8, 2) if quick else (1024, 64, 20)
    convolutions = f"net of 4 Conv2d with batch norm, {channels} to {2 * channels} channels, batch 8 of 32x32"
    return [
        export(f"net of 3 Linear({width}), batch 64", *linear_net(width), rounds),
        export(convolutions, *conv_net(channels), rounds),
    ]


if __name__ == "__main__":
    main(measure)
