"""What an import or a `--help` must not load: time to start, checked without a clock."""

import importlib
import importlib.metadata
import os
import py_compile
import subprocess
import sys
from pathlib import Path

import eff_kernels
import pytest

import efftrain
import hf_eff
import lightning_eff
import shared_core
from shared_core import Session, quantization, register
from shared_core.errors import MissingExtraError

HEAVY = (
    "torchao", "bitsandbytes", "peft", "onnx", "onnxscript", "matplotlib", "opacus", "sklearn", "scipy", "rich",
    "executorch", "compressed_tensors", "gguf", "torch._dynamo", "torch._inductor",
)  # fmt: skip


def loaded(code):
    """Return the names of the modules that a program has loaded at its end."""
    program = f"{code}\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_front_ends_load_nothing_before_they_are_used():
    names = loaded("import efftrain.hf, efftrain.lightning, hf_eff, lightning_eff")
    assert not names & {"torch", "transformers", "pytorch_lightning", "lightning", *HEAVY}


def test_the_front_door_leads_to_the_packages_themselves():
    from hf_eff.callbacks import EffTrainer

    assert EffTrainer is hf_eff.EffTrainer
    assert efftrain.lightning is lightning_eff
    assert (efftrain.Session, efftrain.register) == (Session, register)
    assert all(
        callable(getattr(efftrain, name)) for name in efftrain.__all__ if name not in ("__version__", "hf", "lightning")
    )
    assert efftrain.__version__ == importlib.metadata.version("efftrain")
    assert set(efftrain.__all__) == set(dir(efftrain))
    with pytest.raises(AttributeError, match="efftrain"):
        efftrain.Sesion  # noqa: B018


@pytest.mark.parametrize(("name", "homes"), [("Pruning", ("hf", "lightning")), ("EffTrainer", ("hf",))])
def test_a_callback_taken_from_the_front_door_names_the_package_that_has_it(name, homes):
    with pytest.raises(ImportError) as told:
        exec(f"from efftrain import {name}")
    named = [home for home in ("hf", "lightning") if f"from efftrain.{home} import {name}" in str(told.value)]
    assert named == [*homes]


@pytest.mark.slow
def test_session_and_flags_of_all_techniques_load_neither_techniques_nor_libraries():
    # what every script with a trainer of ours imports beside that trainer's own library
    modules = ("session", "checks.compatibility", "registry")
    code = "; ".join(f"import shared_core.engine.{name}" for name in modules) + "; shared_core.engine.registry.flags()"
    added = loaded(f"import torch; {code}") - loaded("import torch")
    assert "shared_core.pruning.config" in added
    assert not added & set(HEAVY)
    techniques = {name for name in added if name.startswith("shared_core.") and name.endswith(".technique")}
    techniques -= {"shared_core.engine.technique"}  # their base
    assert not techniques
    assert "triton" not in added
    needed = {"eff_kernels.fp8", "eff_kernels._triton", "eff_kernels._triton.launch"}
    assert not {name for name in added if name.startswith("eff_kernels.")} - needed


@pytest.mark.parametrize("command", [(), ("prune",), ("low-rank",), ("run",), ("quantize",)], ids=" ".join)
def test_help_waits_for_no_framework(command):
    help_of = [*command, "--help"]
    names = loaded(f"from shared_core.cli import app; app({help_of}, standalone_mode=False)")
    assert not names & {"torch", "transformers", "pytorch_lightning", "lightning"}


def test_a_function_is_not_hidden_by_the_module_that_it_is_named_after():

    assert quantization.convert is sys.modules["shared_core.quantization.integer.convert"].convert


def test_lazy_packages_tell_their_names(tmp_path, monkeypatch):
    package = tmp_path / "lazy_one"
    package.mkdir()
    (package / "numbers_here.py").write_text("two = 2\n")
    (package / "__init__.py").write_text(
        "from shared_core.lazy_exports import export_lazily\n"
        "__getattr__, __dir__, __all__ = export_lazily(__name__, __file__)\n"
    )
    (package / "__init__.pyi").write_text("from .numbers_here import two as two\n")
    monkeypatch.syspath_prepend(tmp_path)
    import lazy_one

    assert "lazy_one.numbers_here" not in sys.modules
    assert "two" in dir(lazy_one)
    assert lazy_one.__all__ == ["two"]
    assert lazy_one.two == 2
    with pytest.raises(AttributeError, match="module 'lazy_one' has no attribute 'three'"):
        _ = lazy_one.three


def test_lazy_packages_need_no_sources(tmp_path, monkeypatch):
    package = tmp_path / "lazy_compiled"
    package.mkdir()
    text = (
        "from shared_core.lazy_exports import export_lazily\n"
        "__getattr__, __dir__, __all__ = export_lazily(__name__, __file__)\n"
    )
    for name, source in (("one", "two = 2\n"), ("__init__", text)):
        (package / f"{name}.py").write_text(source)
        py_compile.compile(str(package / f"{name}.py"), str(package / f"{name}.pyc"))
        (package / f"{name}.py").unlink()
    (package / "__init__.pyi").write_text("from .one import two as two\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.import_module("lazy_compiled").two == 2


@pytest.mark.parametrize(("library", "error", "told"), [
    ("transformers", MissingExtraError, r"^lazy_two: needs transformers, .* pip install 'efftrain\[hf\]'"),
    ("nobodys_library", ModuleNotFoundError, "nobodys_library"),
])  # fmt: skip
def test_a_name_that_needs_an_extra_tells_which(library, error, told, tmp_path, monkeypatch):
    package = tmp_path / "lazy_two"
    package.mkdir()
    (package / "two_home.py").write_text(f"import {library}\n")
    (package / "__init__.py").write_text(
        "from shared_core.lazy_exports import export_lazily\n"
        "__getattr__, __dir__, __all__ = export_lazily(__name__, __file__)\n"
    )
    (package / "__init__.pyi").write_text("from .two_home import two as two\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, library, None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "lazy_two", raising=False)
    lazy_two = importlib.import_module("lazy_two")
    with pytest.raises(error, match=told):
        _ = lazy_two.two


@pytest.mark.parametrize("name", ["pytorch", "lightning"])
def test_each_name_of_lightning_has_everything(name):
    import lightning_eff

    assert set(dir(lightning_eff)) >= {"Pruning", "DifferentialPrivacy"}
    ours = {word for word in dir(lightning_eff) if word[0].isupper()}
    assert not ours - set(vars(importlib.import_module(f"lightning_eff.{name}")))


@pytest.mark.slow
def test_an_install_of_byte_code_alone_trains(tmp_path):
    # as python -m compileall -b makes it; triton, where it is installed, needs a kernel's source
    for package in (eff_kernels, shared_core, hf_eff, lightning_eff, efftrain):
        folder = Path(package.__file__).parent
        for source in folder.rglob("*"):
            target = tmp_path / folder.name / source.relative_to(folder)
            if source.suffix == ".py":
                target.parent.mkdir(parents=True, exist_ok=True)
                py_compile.compile(str(source), str(target.with_suffix(".pyc")), str(target))
            elif source.suffix == ".pyi":
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(source.read_bytes())
    (tmp_path / "train.py").write_text(
        "import eff_kernels, shared_core, hf_eff, lightning_eff, efftrain\n"
        "import eff_kernels.pruning, eff_kernels.loss_scaling\n"
        "from hf_eff import EffTrainer\nfrom lightning_eff import EffCallback\n"
        "import torch\nfrom torch import nn\nfrom shared_core import training\n"
        "assert shared_core.__file__.endswith('.pyc'), shared_core.__file__\n"
        "model = nn.Linear(8, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "recipe = {'prune': {'sparsity': 0.5, 'end': 1}}\n"
        "with training(recipe, model, optimizer, total_steps=2) as loop:\n"
        "    for _ in range(2):\n"
        "        with loop.forward():\n"
        "            loss = model(torch.ones(2, 8)).square().mean()\n"
        "        loop.backward(loss)\n"
        "        loop.step()\n"
        "import sys\n"
        "print(*(name for name in sys.modules if name.startswith('eff_kernels._triton.')))\n"
        "print(int((model.weight == 0).sum()))\n"
    )
    # -S and an own path: the packages that are installed beside, and not this one with its sources
    code = f"import sys; sys.path[:] = [{str(tmp_path)!r}, *{[entry for entry in sys.path if entry]!r}]\n"
    code += "sys.meta_path[:] = [one for one in sys.meta_path if 'editable' not in repr(one)]\n"
    code += "exec(compile(open(sys.path[0] + '/train.py').read(), 'train.py', 'exec'))"
    compiled = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, env=compiled)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["eff_kernels._triton.launch", "16"]
