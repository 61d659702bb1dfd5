"""The house rules that code can check: who imports whom, what files are called, where the root may not be."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLOORS = {
    "eff_kernels": ROOT / "kernels" / "eff_kernels",
    "shared_core": ROOT / "shared_core",
    "hf_eff": ROOT / "hf_eff",
    "lightning_eff": ROOT / "lightning_eff",
    "efftrain": ROOT / "efftrain",
}
MAY_IMPORT = {
    "eff_kernels": {"eff_kernels"},
    "shared_core": {"eff_kernels", "shared_core"},
    "hf_eff": {"eff_kernels", "shared_core", "hf_eff"},
    "lightning_eff": {"eff_kernels", "shared_core", "lightning_eff"},
    "efftrain": {"efftrain", "hf_eff", "lightning_eff", "shared_core"},
}
ONLY_ON = {
    "triton": {"eff_kernels"},
    "transformers": {"hf_eff"},
    "accelerate": {"hf_eff"},
    "lightning": {"lightning_eff"},
    "pytorch_lightning": {"lightning_eff"},
    "fastai": {"efftrain"},
    "skorch": {"efftrain"},
    "ultralytics": {"efftrain"},
}
SOURCES = [(floor, path) for floor, folder in FLOORS.items() for path in sorted(folder.rglob("*.py"))]


def statements(node):
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(node, name, ()):
            yield inner
            yield from statements(inner)


def is_for_annotations(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


@functools.cache
def imports_of(path):
    """Return the imports of a file, those in functions too, and the blocks of imports for annotations alone."""
    every = statements(ast.parse(path.read_text(encoding="utf-8")))
    return [node for node in every if isinstance(node, ast.Import | ast.ImportFrom) or is_for_annotations(node)]


def imported_names(path):
    for node in imports_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports must be absolute"
            yield (node.module or "").split(".")[0]


def test_no_import_points_upwards_or_sideways():
    for floor, path in SOURCES:
        for name in imported_names(path):
            assert name not in FLOORS or name in MAY_IMPORT[floor], f"{path} imports {name}"
            assert floor in ONLY_ON.get(name, {floor}), f"{path} imports {name}, which belongs to {ONLY_ON.get(name)}"


LEVELS = (
    ("errors", "hardware", "lazy_exports", "libraries", "printing", "distributed"),
    ("config", "files", "modules", "numerics"),
    ("channel_graph", "checkpoint_formats"),
    ("engine",),
    ("front_ends",),
    ("<technique>",),
    ("tools",),
    ("runs",),
    ("reports",),
    ("contrib",),
    ("cli",),
)
STANDS_ON = {
    "lottery_ticket": "pruning",
    "weight_clustering": "pruning",
    "lora": "quantization",
    "weight_average": "soup",
}


@functools.cache
def our_imports():
    """Return who imports whom among the modules of shared_core, imports inside functions included."""
    folder = FLOORS["shared_core"].parent
    modules = {}
    for path in FLOORS["shared_core"].rglob("*.py"):
        name = ".".join(path.relative_to(folder).with_suffix("").parts)
        modules[name.removesuffix(".__init__")] = imports_of(path)
    edges = {name: set() for name in modules}
    for name, nodes in modules.items():
        annotating = {id(inner) for node in nodes if is_for_annotations(node) for inner in node.body}
        imports = (node for node in nodes if isinstance(node, ast.ImportFrom) and id(node) not in annotating)
        for node in (node for node in imports if node.module in modules):
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            edges[name] |= (whole & modules.keys()) or {node.module}
    return edges


@functools.cache
def level_of(package):
    from shared_core.engine.registry import REGISTRY

    package = "<technique>" if package in {one.package.split(".")[1] for one in REGISTRY.values()} else package
    return next((level for level, packages in enumerate(LEVELS) if package in packages), None)


def test_arrows_point_down():
    for module, others in our_imports().items():
        for other in (other for other in others if "." in module and "." in other):
            own, its = module.split(".")[1], other.split(".")[1]
            below = level_of(its) < level_of(own) or own == its or STANDS_ON.get(own) == its
            beside = level_of(its) == level_of(own) and "<technique>" not in LEVELS[level_of(own)]
            assert below or beside, f"{module} imports {other}, which lies above or beside it"


def test_no_modules_import_each_other():
    edges = our_imports()
    done, path = set(), []

    def visit(module):
        assert module not in path, f"{' -> '.join([*path[path.index(module) :], module])}"
        if module not in done:
            path.append(module)
            for other in sorted(edges[module]):
                visit(other)
            done.add(path.pop())

    for module in sorted(edges):
        visit(module)


def test_only_what_shows_strings_as_they_are_writes_to_a_terminal():
    # names in a file of somebody else's may hold what a terminal obeys
    allowed = {"typer.echo(": {"printing.py"}, "rich.console import Console": {"receipt.py"}}
    for _, path in SOURCES:
        text = path.read_text(encoding="utf-8")
        for sign, files in allowed.items():
            assert sign not in text or path.name in files, f"{path}: take echo of printing or Console of reports"


def test_kernels_is_a_folder_and_the_root_is_not_importable():
    # A package named `kernels` hides the Hugging Face package that transformers and bitsandbytes import.
    assert not (ROOT / "kernels" / "__init__.py").exists(), "kernels/__init__.py must not exist; run `make test`"
    roots = [entry for entry in sys.path if entry and Path(entry).resolve() == ROOT]
    assert not roots, "the repository root must stay off sys.path; run `make test`, not `python -m pytest`"


def test_installed_packages_do_not_show_a_kernels_module():
    code = (
        "import importlib.util as u, eff_kernels; spec = u.find_spec('kernels'); print(spec.origin if spec else None)"
    )
    found = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert not found.startswith(str(ROOT)), found
