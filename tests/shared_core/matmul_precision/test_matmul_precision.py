"""float32 products: the setting is made, measured, told and put back; losses computed in 16 bits are seen."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shared_core import hardware
from shared_core.engine.checks.loss_dtype import LossDtype
from shared_core.engine.services import Services
from shared_core.engine.technique import Context
from shared_core.errors import ConfigError
from shared_core.hardware import (
    cpu_capabilities,
    environment,
    float32_matmul_format,
    float32_matmul_precision,
    matmul_hardware,
)
from shared_core.matmul_precision import technique as matmul_precision
from shared_core.matmul_precision.config import MatmulPrecisionConfig
from shared_core.matmul_precision.technique import MatmulPrecision


class Said(Services):
    def __init__(self):
        self.lines = []

    def say(self, text):
        self.lines.append(text)


@pytest.fixture(autouse=True)
def _restored():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def run(precision, model=None):
    model = model or nn.Linear(3, 2)
    technique = MatmulPrecision(MatmulPrecisionConfig(precision=precision))
    context = Context(model=model, services=Said())
    technique.attach(context)
    technique.begin(context, None)
    return technique, context


@pytest.mark.parametrize("previous", ["highest", "high", "medium"])
@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
@pytest.mark.parametrize("end", ["finish", "detach"])
def test_it_is_set_and_put_back(precision, previous, end):
    torch.set_float32_matmul_precision(previous)
    technique, context = run(precision)
    assert torch.get_float32_matmul_precision() == precision
    assert technique.report()["previous"] == previous
    if end == "finish":
        technique.finish(context)
    context.undo.close()
    assert torch.get_float32_matmul_precision() == previous
    torch.set_float32_matmul_precision("medium")
    context.undo.close()  # a second time does nothing
    assert torch.get_float32_matmul_precision() == "medium"


@pytest.mark.parametrize("first_ends", ["first", "last"])
def test_of_two_runs_the_one_that_goes_on_keeps_its_precision(first_ends):
    torch.set_float32_matmul_precision("highest")
    _, first = run("high")
    _, second = run("medium")
    order = [first, second] if first_ends == "first" else [second, first]
    order[0].undo.close()
    assert torch.get_float32_matmul_precision() == ("medium" if order[1] is second else "high")
    order[1].undo.close()
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_run_that_never_ended_decides_nothing_for_later_ones():
    _, lost = run("medium")
    torch.set_float32_matmul_precision("highest")  # by the user, since the lost run did not
    _, later = run("high")
    later.undo.close()
    assert torch.get_float32_matmul_precision() == "highest"
    _, later = run("high")
    lost.undo.close()
    later.undo.close()
    assert torch.get_float32_matmul_precision() == "highest"


def test_newer_switches_are_put_back_too():
    torch.set_float32_matmul_precision("highest")
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    try:
        backends[0].fp32_precision = "tf32"
        assert float32_matmul_precision() == "mixed"
        technique, context = run("medium")
        assert torch.get_float32_matmul_precision() == "medium"
        context.undo.close()
        assert technique.report()["previous"] == "mixed"
        assert [backend.fp32_precision for backend in backends] == ["tf32", "ieee"]
        assert environment()["float32_matmul_precision"] == "mixed"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("kept", ["float32", "tf32", "bf16"])
@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_what_is_told_is_what_was_measured(precision, kept, monkeypatch):
    monkeypatch.setattr(matmul_precision, "float32_matmul_format", lambda device: kept)
    technique, context = run(precision)
    told = technique.report()
    active = (kept == "float32") == (precision == "highest")
    assert (told["active"], told["products_in"], told["requested"]) == (active, kept, precision)
    assert len(context.services.lines) == (not active)
    if not active:
        assert f"{precision} is INACTIVE: " in context.services.lines[0]
        assert told["reason"] in context.services.lines[0]
    assert ("reason" in told) == (not active)


def test_the_reason_on_a_cpu(monkeypatch):
    monkeypatch.setattr(matmul_precision, "float32_matmul_format", lambda device: "float32")
    assert "a CPU has no TF32" in run("high")[1].services.lines[0]
    for able, reason in ((True, "does not use this CPU's bf16 instructions"), (False, "has no bf16 instructions")):
        monkeypatch.setattr(hardware, "matmul_hardware", lambda device, able=able: {"bf16": able})
        assert reason in run("medium")[1].services.lines[0]
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert "oneDNN is missing" in run("medium")[1].services.lines[0]


@pytest.mark.parametrize(("capability", "reason"), [((9, 0), "NVIDIA_TF32_OVERRIDE"), ((7, 5), "7.5 has no TF32")])
def test_the_reason_on_a_gpu(capability, reason, monkeypatch):
    technique, _ = run("high")
    technique._device, technique._format = torch.device("cuda"), "float32"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    assert reason in technique.report()["reason"]


@pytest.mark.parametrize("bits", [23, 10, 7])
def test_the_measurement_sees_rounded_factors(bits, monkeypatch):
    exact = torch.Tensor.__matmul__

    def rounded(a, b):
        ulp = torch.exp2(a.double().abs().log2().floor() - bits)
        return exact(((a.double() / ulp).round() * ulp).float(), b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", rounded)
    assert float32_matmul_format("cpu") == {23: "float32", 10: "tf32", 7: "bf16"}[bits]


def test_measured_here_it_agrees_with_a_product_in_float64():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator) for _ in range(2))
    for precision in ("highest", "medium"):
        torch.set_float32_matmul_precision(precision)
        error = (a @ b - (a.double() @ b.double())).abs().max().item()
        assert (float32_matmul_format("cpu") == "bf16") == (error > 5e-3)  # 16·2^-8 beside 16·2^-24


def test_hardware_is_in_every_receipt(monkeypatch):
    told = environment()
    assert told["float32_matmul_precision"] == torch.get_float32_matmul_precision()
    assert told["multiplies"].keys() == {"tf32", "bf16", "fp8"}
    assert matmul_hardware("cpu")["tf32"] is matmul_hardware("meta")["bf16"] is False
    for capability, expected in (((7, 5), (False, False)), ((8, 0), (True, False)), ((9, 0), (True, True))):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, value=capability: value)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
        found = hardware.matmul_hardware("cuda")
        assert (found["tf32"], found["fp8"]) == expected


def test_refusals():
    with pytest.raises(ConfigError, match="precision must be one of highest, high, medium"):
        MatmulPrecisionConfig(precision="tf32")
    with pytest.raises(ConfigError, match="precision must be given"):
        MatmulPrecisionConfig.from_dict({})


LABELS = torch.tensor([0, 2])
X = torch.ones(2, 4)


def head(dtype):
    torch.manual_seed(0)
    return nn.Linear(4, 3, dtype=dtype)


def losses():
    """What a loss was computed in, and how: name → (loss, dtype of the loss, of its softmax)."""
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16"), (torch.float32, "float32")):
        logits = head(dtype)(X.to(dtype))
        yield f"{name}", F.cross_entropy(logits, LABELS), name, name
        yield f"{name} cast afterwards", F.cross_entropy(logits, LABELS).float() / 3, name, name
        yield f"{name} upcast", F.cross_entropy(logits.float(), LABELS), "float32", "float32"
        yield f"{name} by hand", (logits - 1).square().mean().float(), name, None
        soft = -(torch.log_softmax(logits, -1).float()[:, 0]).mean()
        yield f"{name} softmax alone", soft, "float32", name
        with torch.autocast("cpu", torch.bfloat16):
            yield f"{name} autocast", F.cross_entropy(logits.bfloat16(), LABELS), "float32", "float32"
    query = head(torch.bfloat16)(X.bfloat16())
    attended = torch.softmax(query @ query.T, -1) @ query
    yield "attention is the model's own", F.mse_loss(attended.float(), query.detach().float()), "float32", None
    yield "no graph", torch.zeros(()), "float32", None


@pytest.mark.parametrize("case", list(losses()), ids=lambda case: case[0])
def test_the_loss_is_told_as_it_was_computed(case):
    _, loss, dtype, softmax = case
    probe = LossDtype()
    narrow = {dtype, softmax} & {"bfloat16", "float16"}
    assert probe.see(loss) == bool(narrow)
    assert probe.report() == {"loss_dtype": dtype, "softmax_dtype": softmax}
    assert not probe.see(loss)  # once
    if narrow:
        assert narrow.pop() in probe.warning()


def test_a_16_bit_loss_is_said_once_and_is_in_the_report():
    technique, context = run("highest")
    context.services.lines.clear()
    loss = F.cross_entropy(head(torch.bfloat16)(X.bfloat16()), LABELS)
    assert technique.loss(loss, context) is loss
    technique.loss(loss, context)
    (line,) = context.services.lines
    assert "computed in bfloat16" in line
    assert technique.report()["softmax_dtype"] == "bfloat16"
    resumed = MatmulPrecision(technique.config)
    resumed.begin(context, technique.state_dict())
    assert resumed.loss_dtype.report() == technique.loss_dtype.report()
    assert not resumed.loss_dtype.see(loss)
    assert LossDtype().report() == {}


@pytest.mark.parametrize(
    ("told", "expected", "name"),
    [
        (
            "model name\t: A Xeon\nflags\t\t: fpu avx2 avx512f avx512_bf16\n",
            ("avx2", "avx512_f", "avx512_bf16"),
            "A Xeon",
        ),
        ("Features\t: fp asimd sve bf16 svebf16\n", ("neon", "sve", "bf16", "sve_bf16"), "unknown"),
        (None, (), "unknown"),
    ],
)
def test_a_torch_that_tells_no_instructions_leaves_them_to_linux(told, expected, name, tmp_path, monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(hardware, "_CPU_INFO", tmp_path / "cpuinfo")
    if told is not None:
        (tmp_path / "cpuinfo").write_text(told)
    able = cpu_capabilities()
    assert able["cpu_name"] == name
    assert all(able[one] for one in expected)
    assert not {"amx_bf16", "avx512_vnni"} & able.keys()
    assert matmul_hardware("cpu")["bf16"] == ("bf16" in " ".join(expected))
