"""A stand-in for Triton's driver: what the launchers pass is specialized as on a GPU and recorded; nothing runs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

ARCHITECTURES = {"sm_80": 80, "sm_90": 90, "sm_100": 100}
_LARGEST_GRID = 2**31 - 1, 65535, 65535


class Launch(NamedTuple):
    """A launch, specialized: an integer that equals 1 is among the constants, attributes say what 16 divides."""

    kernel: Any
    grid: tuple[int, ...]
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: Any
    target: Any
    values: dict[str, int]
    """Of the integers that are passed, by name."""

    @property
    def key(self) -> str:
        """Equal for launches that lower alike: architectures differ in constants and in types, not otherwise."""
        specialized = self.signature, self.constants, self.attributes, self.options.enable_fp_fusion
        return repr((self.kernel.fn.__name__, *specialized))

    @property
    def programs(self) -> int:
        return math.prod(self.grid)

    @property
    def threads(self) -> int:
        return 32 * self.options.num_warps * self.programs

    @property
    def is_large(self) -> bool:
        """Whether two of its sizes together exceed 32 bits."""
        *_, a, b = sorted((1, self.programs, *self.values.values()))
        return a * b >= 2**31

    def lower(self) -> str:
        """Return the kernel in Triton's own intermediate language without calls, checked by its verifier."""
        from triton._C.libtriton import ir, passes
        from triton.compiler import ASTSource
        from triton.compiler.compiler import make_backend

        source = ASTSource(self.kernel, self.signature, self.constants, self.attributes)
        backend, context = make_backend(self.target), ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        functions = backend.get_codegen_implementation(self.options)
        module = source.make_ir(self.target, self.options, functions, backend.get_module_map(), context)
        if not module.verify():
            raise AssertionError(f"{self.kernel.fn.__name__} does not verify")
        manager = ir.pass_manager(module.context)
        passes.common.add_inliner(manager)
        manager.run(module, "inline")
        return str(module)

    def compile(self) -> bytes:
        """Return the machine code, without tables of source lines, which take as long."""
        import triton
        from triton.compiler import ASTSource

        source = ASTSource(self.kernel, self.signature, self.constants, self.attributes)
        with triton.knobs.compilation.scope():
            triton.knobs.compilation.disable_line_info = True
            made: bytes = triton.compile(source, target=self.target, options=vars(self.options)).asm["cubin"]
        return made


class _Driver:
    def __init__(self, target: Any):
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def kernels() -> dict[str, set[str]]:
    """Return by module the names of all kernels: the jitted functions that return nothing, and that none calls."""
    found: dict[str, set[str]] = {}
    for module in _modules():
        own = {name: value for name, value in vars(module).items() if _is_of(value, module.__name__)}
        called = {name for value in own.values() for name in value.fn.__code__.co_names}
        for name, value in own.items():
            if name not in called and value.fn.__annotations__["return"] in (None, "None"):
                found.setdefault(module.__name__.rpartition(".")[2], set()).add(value.fn.__name__)
    return found


def _is_of(value: Any, module: str) -> bool:
    return getattr(value, "__module__", "") == module and hasattr(value, "fn") and hasattr(value, "run")


def _modules() -> Iterator[Any]:
    import importlib
    import pkgutil

    import eff_kernels._triton as package

    for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        yield importlib.import_module(found.name)


@contextlib.contextmanager
def recording(architecture: str) -> Iterator[Callable[[Callable[[], object]], list[Launch]]]:
    """Yield a function that calls another and returns the launches that it made; tensors are on the meta device."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    if knobs.runtime.interpret:
        raise RuntimeError("Triton interprets: run with TRITON_INTERPRET=0")
    target = GPUTarget("cuda", ARCHITECTURES[architecture], 32)
    launches: list[Launch] = []
    grids: list[tuple[int, ...]] = []
    values: list[dict[str, int]] = []
    run = JITFunction.run

    def launch(self: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> None:
        if not all(0 < size <= largest for size, largest in zip(grid, _LARGEST_GRID, strict=False)):
            raise AssertionError(f"{self.fn.__name__}: CUDA takes no grid of {grid}")
        if "enable_fp_fusion" not in kwargs:
            raise AssertionError(f"{self.fn.__name__}: enable_fp_fusion must be given, its default changes")
        grids.append(grid)
        passed = dict(zip(self.arg_names, args, strict=False)) | kwargs
        values.append({name: value for name, value in passed.items() if isinstance(value, int)})
        self.device_caches.clear()
        run(self, *args, grid=grid, warmup=warmup, **kwargs)

    def compiled(
        self: Any, key: Any, signature: Any, device: int, constants: Any, options: Any, attributes: Any, warmup: bool
    ) -> None:
        launches.append(Launch(self, grids[-1], signature, constants, attributes, options, target, values[-1]))

    def record(call: Callable[[], object]) -> list[Launch]:
        launches.clear()
        call()
        return list(launches)

    native = mock.Mock(return_value=ARCHITECTURES[architecture] >= 89)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(driver, "_active", _Driver(target)))
        stack.enter_context(mock.patch.multiple(JITFunction, run=launch, _do_compile=compiled))
        for module in _modules():
            if hasattr(module, "has_native_fp8"):
                stack.enter_context(mock.patch.object(module, "has_native_fp8", native))
        yield record
