"""A pretended ``cuda:0``: its tensors have that device and keep their numbers on the CPU.

Whole training steps run on it. An operation on tensors of two devices raises, as it does on a GPU, and whatever makes
the host wait for the device is counted by the line that did it. torch cannot be told to forget a device, so that
`on_pretended_device` runs each function in a fork of the process.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import hashlib
import importlib
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

CUDA = torch.device("cuda", 0)
CAPABILITY = (9, 0)
_ROOT = Path(__file__).parents[2]
_OURS = tuple(str(_ROOT / name) for name in ("shared_core/", "kernels/", "hf_eff/", "lightning_eff/"))
_LAST = 40  # lines of a traceback
_HERE = str(Path(__file__).parent)

# What reads a value, or a number of values, on the host.
_READS = {
    *("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero", "aten::masked_select"),
    *("aten::bincount", "aten::_unique2", "aten::unique_consecutive", "aten::unique_dim", "aten::_linalg_svd"),
    *("aten::_linalg_eigh", "aten::_linalg_check_errors"),
}
# What takes tensors of both devices.
_COPIES = ("aten::copy_", "aten::_to_copy", "aten::_foreach_copy_")
_INDEXES = ("aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put")
# A tensor without axes on the CPU counts as a number there, beside all that works element by element.
_TAKES_NUMBERS = ("aten::masked_fill", "aten::masked_fill_", "aten::fill_", *_INDEXES)


def _leaves(value: Any) -> Iterator[Any]:
    """Yield what lies in lists, tuples and dictionaries; torch's own trees take twice as long."""
    if isinstance(value, list | tuple | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _leaves(part)
    else:
        yield value


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(change, part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [_mapped(change, part) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return change(value)


_WITHOUT_LAUNCH = "empty", "new_empty", "unsafe_view", "reshape_alias", "local_scalar_dense", "has_compatible"


class MixedDevicesError(RuntimeError):
    """An operation was given tensors of two devices."""


class DeviceTensor(Tensor):
    """A tensor on the pretended device; `values` are its numbers."""

    values: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: Tensor) -> DeviceTensor:
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls, values.size(), strides=values.stride(), storage_offset=values.storage_offset(),
            dtype=values.dtype, layout=values.layout, device=CUDA,
        )  # fmt: skip
        made.values = values
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return entered().handle(func, args, kwargs or {})

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:
        if not isinstance(other, DeviceTensor):
            raise MixedDevicesError(f"data of a tensor on {CUDA} was set to one on {other.device}")
        Tensor.data.__set__(self, other)
        self.values = other.values

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({self.values})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copy = DeviceTensor(self.values.clone(memory_format=torch.preserve_format))
            is_parameter = isinstance(self, torch.nn.Parameter)
            memo[id(self)] = torch.nn.Parameter(copy) if is_parameter else copy
            memo[id(self)].requires_grad_(self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        entered().waited("save")
        return _on_device, (self.values, isinstance(self, torch.nn.Parameter), self.requires_grad)

    def data_ptr(self) -> int:
        return self.values.data_ptr()

    def untyped_storage(self) -> Any:
        return self.values.untyped_storage()

    def pin_memory(self, *_: Any) -> Any:
        raise RuntimeError("cannot pin a tensor of a device, only dense CPU tensors")

    def tolist(self) -> Any:
        entered().waited("tolist")
        return self.values.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")


def _on_device(values: Tensor, is_parameter: bool, requires_grad: bool) -> Tensor:
    made = DeviceTensor(values)
    return torch.nn.Parameter(made, requires_grad) if is_parameter else made.requires_grad_(requires_grad)


class DeviceGenerator(torch.Generator):
    """A generator of either device; operators see the part of it that is C++, so that its address tells the device."""

    on_device: ClassVar[dict[int, Any]] = {}
    """Those of the device by address; kept, as another at the address of one that is gone would be taken for it."""

    def __new__(cls, device: Any = "cpu") -> Any:
        made = super().__new__(cls, "cpu")
        if torch.device(device).type == "cuda":
            cls.on_device[made._cdata] = made
        return made

    @property
    def device(self) -> torch.device:
        return CUDA if self._cdata in self.on_device else torch.device("cpu")


class PretendedDevice(TorchDispatchMode):
    """Runs what is dispatched while it is entered; counts waits of the host.

    Attributes:
        waits: By kind and place how often the host waited.
        launches: By operator how often one was launched on the device; views and allocations launch nothing.
        fast: Products that sum in the tensor cores' own accumulator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: collections.Counter[tuple[str, str]] = collections.Counter()
        self.launches: collections.Counter[str] = collections.Counter()
        self.fast = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.handle(func, args, kwargs or {})

    def waited(self, kind: str) -> None:
        """Count a wait of the host at the line that made it."""
        self.waits[kind, _place()] += 1

    def taken(self) -> collections.Counter[tuple[str, str]]:
        """Return the waits since the last call."""
        waits, self.waits = self.waits, collections.Counter()
        return waits

    def handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what the operator returns on the device."""
        name = func._schema.name
        tensors = [leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_ours = any(isinstance(tensor, DeviceTensor) for tensor in tensors)
        wanted = kwargs.get("device")
        goes_here = is_ours if wanted is None else torch.device(wanted).type == "cuda"
        if name == "prim::device":
            return CUDA if is_ours else args[0].device
        if name in ("aten::copy_", "aten::_foreach_copy_"):
            goes_here = isinstance(args[0] if name == "aten::copy_" else args[0][0], DeviceTensor)
        if is_ours:
            _refuse_mixed(func, name, tensors)
            self._count_reads(func, name, args, kwargs)
        _refuse_generator(name, args, kwargs, goes_here)
        self._count_copies(name, args, kwargs, is_ours, goes_here)
        if not (is_ours or goes_here):
            return func(*args, **kwargs)
        if name.startswith("efftrain::"):
            with self:  # what it does is done on the device
                return torch._library.custom_ops.OPDEFS[name]._init_fn(*args, **kwargs)
        if not _launches_nothing(func, name):
            self.launches[name] += 1
            self.fast += _sums_fast(func, args, kwargs)
        if name == "c10d::allreduce_":
            return args[0], _work(args[0])
        out = _on_cpu(func, name, args, kwargs)
        return _returned(func, args, kwargs, out) if goes_here else out

    def _count_reads(self, func: Any, name: str, args: Any, kwargs: Any) -> None:
        if name in _READS:
            self.waited(name.removeprefix("aten::_").removeprefix("aten::"))
        elif name in _INDEXES:
            indices = [index for index in args[1] if index is not None]
            if any(isinstance(index, DeviceTensor) and index.dtype in (torch.bool, torch.uint8) for index in indices):
                self.waited("bool index")
            if any(not isinstance(index, DeviceTensor) for index in indices):
                self.waited("index from host")
        elif name == "bitsandbytes::int8_vectorwise_quant" and args[1:] not in ((), (0.0,)):
            self.waited("outliers")  # their columns are picked, in every product
        elif func is torch.ops.aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            self.waited("repeat_interleave")

    def _count_copies(self, name: str, args: Any, kwargs: Any, is_ours: bool, goes_here: bool) -> None:
        # from and to memory that is not pinned a copy waits, unless it only goes to the device and is said not to
        blocks = not (kwargs.get("non_blocking") or (name == "aten::copy_" and len(args) > 2 and args[2]))
        if name not in _COPIES:
            return
        source = args[1] if name != "aten::_to_copy" else args[0]
        from_here = any(isinstance(leaf, DeviceTensor) for leaf in _leaves(source))
        if from_here and not goes_here and is_ours:
            if blocks or name == "aten::_to_copy" or not _is_pinned(args[0]):
                self.waited("to host")
        elif goes_here and not from_here and blocks:
            self.waited("to device")


@functools.cache
def _launches_nothing(func: Any, name: str) -> bool:
    aliases = [found.alias_info for found in func._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in aliases)
    return is_view or name.removeprefix("aten::").lstrip("_").startswith(_WITHOUT_LAUNCH)


def _sums_fast(func: Any, args: Any, kwargs: Any) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return given.get("use_fast_accum") is True


_current: list[PretendedDevice] = []


def entered() -> PretendedDevice:
    """Return the device that runs what is dispatched."""
    return _current[0]


def _place() -> str:
    """Return the two innermost lines of this project on the stack, else the innermost outside of torch."""
    found, other, frame = [], "torch", sys._getframe(2)
    while frame is not None and len(found) < 2:
        file = frame.f_code.co_filename
        if file.startswith(_OURS):
            found.append(f"{file[len(str(_ROOT)) + 1 :]}:{frame.f_lineno} {frame.f_code.co_name}")
        elif other == "torch" and not file.startswith(_HERE) and "/torch/utils/_" not in file:
            other = f"{Path(file).name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found) or other


def _refuse_mixed(func: Any, name: str, tensors: list[Tensor]) -> None:
    if name in _COPIES or name.startswith("efftrain::"):
        return
    others = [tensor for tensor in tensors if not isinstance(tensor, DeviceTensor)]
    if name in _INDEXES:
        return
    takes_numbers = torch.Tag.pointwise in func.tags or name in _TAKES_NUMBERS or name.startswith("aten::_foreach_")
    if any(tensor.ndim or not takes_numbers for tensor in others):
        shapes = [tuple(tensor.shape) for tensor in others]
        raise MixedDevicesError(f"{name}: tensors on cuda:0 beside some on the CPU of shapes {shapes} at {_place()}")


def _refuse_generator(name: str, args: Any, kwargs: Any, goes_here: bool) -> None:
    for leaf in _leaves((args, kwargs)):
        if isinstance(leaf, torch._C.Generator) and (leaf._cdata in DeviceGenerator.on_device) != goes_here:
            raise MixedDevicesError(f"{name}: a generator of another device than the tensors' at {_place()}")


def _on_cpu(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Return what the operator returns for the numbers, in place of the CPU's own where that lacks it."""

    def plain(leaf: Any) -> Any:
        if isinstance(leaf, DeviceTensor):
            return leaf.values
        return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "cuda" else leaf

    args, kwargs = _mapped(plain, args), _mapped(plain, kwargs)
    if "pin_memory" in kwargs:
        kwargs["pin_memory"] = False
    if name in ("aten::_softmax", "aten::_log_softmax") and args[2]:  # 16 bits in, 32 out
        return func(args[0].float(), args[1], False)
    if name in ("aten::_softmax_backward_data", "aten::_log_softmax_backward_data"):
        return func(*[arg.float() if isinstance(arg, Tensor) else arg for arg in args[:3]], torch.float32).to(args[3])
    if name in ("aten::_scaled_mm", "aten::_scaled_mm_v2"):
        dtype = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.dtype)), torch.bfloat16)
        if args[0].dtype == torch.float4_e2m1fn_x2:  # which the CPU does not read
            return torch.zeros(args[0].shape[0], args[1].shape[1], dtype=dtype)
        return (args[0].float() @ args[1].float()).to(dtype)
    if func is torch.ops.aten.addmm.dtype_out:  # half factors and a float32 sum, which CUDA alone multiplies
        return func.overloadpacket.out(args[0], args[1].float(), args[2].float(), **kwargs)
    if name in _BY_TRITON:
        return _like_declared(func, args, kwargs)
    return func(*args, **kwargs)


# What only Triton computes. Tests of the kernels look at the numbers; here what is read, and where, is at stake.
_BY_TRITON = {
    f"eff_kernels::{name}"
    for name in (*("round_to_grid", "grid_gradients", "round_rows", "mx_round", "nvfp4_round"), "round_float_")
}


def _like_declared(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what the operator says that it returns: of the first tensor's shape its numbers, else ones."""
    first = next(leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, Tensor))
    args, kwargs = _mapped(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, (args, kwargs))

    def filled(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)
        return made.copy_(first if leaf.shape == first.shape else torch.ones(()))

    return _mapped(filled, func(*args, **kwargs))


def _work(tensors: Any) -> Any:
    """Return the finished work of a collective, as `torch.distributed` boxes it."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(tensors)
    return torch._C._distributed_c10d._create_work_from_future(future).boxed()


def _returned(func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """Return results as tensors of the device; an argument that was written to is returned as itself."""
    written: dict[frozenset[str], Any] = {}
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written[frozenset(argument.alias_info.before_set)] = value
            for leaf in _leaves(value):
                if isinstance(leaf, DeviceTensor) and leaf.shape != leaf.values.shape:
                    raise NotImplementedError(f"{func} changes the shape of its argument: make it part of the device")
    returns = func._schema.returns

    def of(declared: Any, value: Any) -> Any:
        if declared.alias_info is not None and frozenset(declared.alias_info.before_set) in written:
            return written[frozenset(declared.alias_info.before_set)]
        return _mapped(lambda leaf: DeviceTensor(leaf) if isinstance(leaf, Tensor) else leaf, value)

    if len(returns) == 1:
        return of(returns[0], out)
    return tuple(of(*pair) for pair in zip(returns, out, strict=True)) if returns else out


class _Stream(contextlib.nullcontext[None]):
    """A stream, an event or a device: all that they do is that the host may wait."""

    cuda_stream = stream_id = device_index = 0
    device_type = 1

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def _nothing(self, *_: Any) -> None: ...

    wait_stream = wait_event = wait = record = _nothing

    def record_event(self, *_: Any) -> Any:
        return _Stream()

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 1.0

    def synchronize(self) -> None:
        entered().waited("synchronize")


def _state() -> Tensor:
    return torch.zeros(16, dtype=torch.uint8)


def _quantized(sources: Any, dtype: torch.dtype, block: Any, rounding: Any) -> list[Any]:
    """Stand in for `quantize_triton`, whose kernels note what they see themselves."""
    from eff_kernels import fp8
    from eff_kernels._triton.fp8 import Cast

    found, before = [], entered().launches.copy()
    for source in sources:
        matrix, turned = fp8._quantize(source, dtype, block, rounding)
        other = matrix if turned is None else turned
        found.append(Cast(matrix.codes, matrix.scale, other.codes, other.scale, None))
    # what the plain code launched is not: two kernels for two matrices of one scale each, one for any other
    before["eff_kernels::fp8_quantize"] += len(sources) + len(sources) % 2 if block == (0, 0) else len(sources)
    entered().launches = before
    return found


def _fake_quantized(x: Tensor, dtype: torch.dtype, by_row: bool) -> Tensor:
    entered().launches["eff_kernels::fp8_fake_quantize"] += 1 if by_row else 2
    return DeviceTensor(x.values.clone())


def _patch() -> None:
    from eff_kernels._triton import fp8, launch

    from shared_core.activation_compression import saved_tensors

    properties = type("Properties", (), {
        "name": "pretended", "major": CAPABILITY[0], "minor": CAPABILITY[1], "total_memory": 80 << 30,
        "multi_processor_count": 132, "warp_size": 32, "gcnArchName": "",
    })  # fmt: skip
    values: dict[str, Any] = {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
        "get_device_capability": lambda *_: CAPABILITY, "get_device_name": lambda *_: "pretended",
        "get_device_properties": lambda *_: properties, "is_bf16_supported": lambda *_, **__: True,
        "is_initialized": lambda: False, "is_current_stream_capturing": lambda: False,
        "current_stream": _Stream, "default_stream": _Stream, "Stream": _Stream, "Event": _Stream,
        "stream": _Stream, "device": _Stream, "device_of": _Stream,
        "synchronize": lambda *_: entered().waited("synchronize"),
        "get_rng_state": lambda *_: _state(), "get_rng_state_all": lambda: [_state()],
        "mem_get_info": lambda *_: (80 << 30, 80 << 30),
    }  # fmt: skip
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        values[name] = lambda *_: 0
    for name in ("_lazy_init", "set_device", "empty_cache", "reset_peak_memory_stats", "set_rng_state"):
        values[name] = lambda *_, **__: None
    values["set_rng_state_all"] = lambda *_: None
    for name, value in values.items():
        setattr(torch.cuda, name, value)
    torch.version.cuda = "12.9"
    # a parameter of the CPU cannot become a subclass in its place
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    torch.Generator = DeviceGenerator  # type: ignore[misc]
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign,assignment]
    for name in ("tensor", "as_tensor"):
        setattr(torch, name, _made_on_cpu(getattr(torch, name)))
    for name in ("empty", "zeros"):
        setattr(torch, name, _pinned(getattr(torch, name)))
    torch.Tensor._make_subclass = staticmethod(_made_subclass(torch.Tensor._make_subclass))  # type: ignore[method-assign]
    if "bitsandbytes" in sys.modules:
        sys.modules["bitsandbytes"].nn.Int8Params._quantize = _quantized_to
    saved_tensors._PLAIN += (DeviceTensor,)
    fp8.quantize_triton = _quantized
    fp8.fake_quantize_triton = _fake_quantized
    is_plain = launch.is_plain
    for module in list(sys.modules.values()):
        if getattr(module, "is_plain", None) is is_plain:
            module.is_plain = lambda x: is_plain(x) or isinstance(x, DeviceTensor)  # type: ignore[attr-defined]


@functools.cache
def _on_device_too(cls: type) -> type:
    return type(cls.__name__, (cls, DeviceTensor), {})


def _made_subclass(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return what makes a tensor one of a subclass: bitsandbytes has its own parameters."""

    @functools.wraps(make)
    def made(cls: type, data: Tensor, requires_grad: bool = False) -> Tensor:
        if not isinstance(data, DeviceTensor):
            return make(cls, data, requires_grad)
        return DeviceTensor.__new__(_on_device_too(cls), data.values).requires_grad_(requires_grad)

    return made


def _quantized_to(self: Any, device: Any) -> Any:
    """Stand in for what gives a parameter of the CPU codes on the device: a tensor has one kind here."""
    import bitsandbytes as bnb

    codes, scales, _ = bnb.functional.int8_vectorwise_quant(self.data.to(device, torch.float16))
    return bnb.nn.Int8Params(codes, False, CB=codes, SCB=scales)


def _made_on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the constructor in two steps, as it works inside: a tensor of the host, which is copied."""

    @functools.wraps(make)
    def made(data: Any, *args: Any, device: Any = None, **options: Any) -> Tensor:
        if device is None or torch.device(device).type != "cuda":
            return make(data, *args, device=device, **options)
        return (data if isinstance(data, DeviceTensor) else make(data, *args, **options)).to(CUDA)

    return made


def _pinned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the constructor such that it remembers what should be pinned, which only a GPU's driver can do."""

    @functools.wraps(make)
    def made(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        result = make(*args, **options)
        if pin_memory:
            result.is_to_be_pinned = True  # type: ignore[attr-defined]
        return result

    return made


def _is_pinned(tensor: Tensor) -> bool:
    return hasattr(tensor if tensor._base is None else tensor._base, "is_to_be_pinned")


@functools.cache
def _guard() -> Path:
    """Return the compiled device guard; kept for the next process of this torch."""
    source = Path(__file__).with_name("pretended_guard.cpp")
    torch_folder = Path(torch.__file__).parent
    key = hashlib.sha256(source.read_bytes() + f"{torch.__version__} {torch_folder}".encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"efftrain-pretended-{os.getuid()}-{key}.so"
    if library.exists():
        return library
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        raise RuntimeError("gpu lane: a C++ compiler must be installed for the pretended device, got none; install g++")
    aside = library.with_suffix(f".{os.getpid()}")
    command = [compiler, "-shared", "-fPIC", "-std=c++20", f"-I{torch_folder / 'include'}", str(source)]
    done = subprocess.run(
        [*command, f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10", "-o", str(aside)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"gpu lane: the device guard must compile, got this from {compiler}:\n{done.stderr}")
    aside.replace(library)
    return library


def on_pretended_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function such that it runs on the pretended device, in a fork; its first argument is the device.

    What it returns must be picklable; what it raises is raised as an AssertionError that holds the traceback.
    """

    @functools.wraps(function)
    def forked(*args: Any, **kwargs: Any) -> Any:
        _guard()
        importlib.import_module("torch._dynamo")  # as torch is: it refuses to be imported over what is patched
        reader, writer = os.pipe()
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            _run_child(writer, lambda device: function(device, *args, **kwargs))
        os.close(writer)
        with os.fdopen(reader, "rb") as stream:
            sent = stream.read()
        os.waitpid(child, 0)
        if not sent:
            raise AssertionError("the process on the pretended device died")
        raised, value = pickle.loads(sent)
        if raised:
            raise AssertionError(raised)
        return value

    return forked


def _run_child(writer: int, function: Callable[[PretendedDevice], Any]) -> None:
    """Run the function and end the process."""
    try:
        ctypes.CDLL(str(_guard())).install_guard()
        torch.utils._device._device_constructors()  # listed once: what takes the default device, before it is patched
        _patch()
        device = PretendedDevice()
        _current.append(device)
        with device:
            sent = "", function(device)
    except BaseException:
        sent = "".join(traceback.format_exc().splitlines(keepends=True)[-_LAST:]), None
    with os.fdopen(writer, "wb") as stream:
        pickle.dump(sent, stream)
    sys.stdout.flush()
    os._exit(0)
