"""Codes between the convolutions of an exported graph: activations that no layer quantises get a quantiser too."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shared_core.atomic import scratch_folder
from shared_core.errors import ConfigError
from shared_core.quantization.export_check import feeds, session_of
from shared_core.quantization.range_estimator import RangeEstimator
from shared_core.quantization.range_estimators import make_observer

# A quantiser behind one of these moves before it, or takes it in: onnxruntime computes it on the codes.
_FOLLOWS = frozenset({"Relu", "Clip", "MaxPool", "Reshape", "Flatten", "Transpose"})
_JOINS = frozenset({"Add", "Concat"})


def quantize_activations(exact: Path, file: Path, calibration: Iterable[Any]) -> tuple[str, ...]:
    """Write an exported file anew so that convolutions hand codes on; return the tensors that got a quantiser.

    onnxruntime sums a convolution in integers only where its output is quantised. Where a residual sum, a
    concatenation or an average pool reads the output, training has put no quantiser: one is added, in uint8, with the
    range of least squared error over the calibration batches. Readers of a tensor that is quantised for some layer
    read those codes too, and so sums and concatenations of codes are computed on codes. Biases of convolutions take
    the scale of the sums, s_x·s_w, whatever that rounds away. Outputs of the model stay in float.

    Args:
        exact: As `export_onnx` writes it.
        file: Where it is written.
        calibration: Batches of inputs, each as `call_model` takes them.

    Raises:
        ConfigError: If there is no batch.
        TrainingError: If a tensor saw no finite value.

    Source: the integer-only graphs of Jacob et al. 2018, arXiv:1712.05877, sections 2.3 and 2.4.
    """
    import onnx

    model = onnx.load(exact)
    graph = _Graph(model.graph)
    for node in list(model.graph.node):
        integer = graph.is_integer_convolution(node)
        if integer:
            graph.round_bias(node)
        if integer or graph.joins_codes(node):
            graph.hand_on_codes(graph.end_of(node.output[0]))
    for name, observer in _observed(exact, graph.new, calibration).items():
        scale, zero_point = observer.scale_zero_point()
        graph.constants[f"{name}_scale"] = np.array(scale.item(), np.float32)
        graph.constants[f"{name}_zero_point"] = np.array(zero_point.item(), np.uint8)
    graph.write()
    onnx.save(model, file)
    return tuple(graph.new)


def _observed(file: Path, names: list[str], calibration: Iterable[Any]) -> dict[str, RangeEstimator]:
    """Return an observer of each tensor; it has seen all batches."""
    import onnx

    model = onnx.load(file)
    model.graph.output.extend(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in names)
    observers = {name: make_observer("mse", qmin=0, qmax=255) for name in names}
    batches = 0
    with scratch_folder() as folder:
        probe = folder / "probe.onnx"
        onnx.save(model, probe)
        session = session_of(probe, optimise=False)
        for batch in calibration:
            batches += 1
            try:
                found = session.run(names, feeds(session, batch)) if names else ()
            except Exception as error:  # onnxruntime's errors share no public base
                raise ConfigError(
                    f"export_onnx: calibration must hold what the model takes, got {type(batch).__name__} "
                    f"({str(error)[:300]}); pass batches like example_inputs, without labels"
                ) from error
            for name, value in zip(names, found, strict=True):
                observers[name].update(torch.from_numpy(value))
    if not batches:
        raise ConfigError("export_onnx: calibration must hold batches, got none")
    return observers


class _Graph:
    """Who makes and who reads each tensor of a graph, and the nodes that are to be added.

    Args:
        graph: An ONNX graph in topological order.
    """

    def __init__(self, graph: Any) -> None:
        import onnx

        self._graph = graph
        self._outputs = {value.name for value in graph.output}
        self._makers = {name: node for node in graph.node for name in node.output}
        self._readers: dict[str, list[Any]] = {}
        for node in graph.node:
            for name in dict.fromkeys(node.input):
                self._readers.setdefault(name, []).append(node)
        self.constants = {value.name: onnx.numpy_helper.to_array(value) for value in graph.initializer}
        """Name → array; those that are added are written too."""
        self._added: dict[str, list[Any]] = {}  # tensor → nodes that follow its maker
        self._first: list[Any] = []  # nodes that read constants alone
        self._removed: set[int] = set()
        self.new: list[str] = []
        """Tensors that got a quantiser."""

    def is_integer_convolution(self, node: Any) -> bool:
        """Return whether codes go in, of input and weight and of the bias if there is one."""
        parameters = filter(None, node.input[1:])
        return node.op_type == "Conv" and self._is_activation(node.input[0]) and all(map(self._is_code, parameters))

    def joins_codes(self, node: Any) -> bool:
        """Return whether all that a sum or concatenation reads are codes, or can be: then it does."""
        if node.op_type not in _JOINS or not any(map(self._is_activation, node.input)):
            return False
        others = {name: self._quantizer_of(name) for name in node.input if not self._is_activation(name)}
        if None in others.values():
            return False
        for name, quantizer in others.items():
            self._let_read(name, quantizer)
        return True

    def round_bias(self, convolution: Any) -> None:
        """Put the bias of an integer convolution on the grid of its sums, for no kernel takes another."""
        import onnx

        if len(convolution.input) < 3:
            return
        x, weight, bias = (self._makers[name] for name in convolution.input[:3])
        step = self.constants[x.input[1]].astype(np.float64) * self.constants[weight.input[1]]
        value = self.constants[bias.input[0]] * self.constants[bias.input[1]].astype(np.float64)
        name = f"{convolution.output[0]}_bias"
        largest = 2**30
        self.constants[f"{name}_codes"] = np.clip(np.rint(value / step), -largest, largest).astype(np.int32)
        self.constants[f"{name}_scale"] = step.astype(np.float32)
        self.constants[f"{name}_zero_point"] = np.zeros(len(step), np.int32)
        parameters = [f"{name}_{kind}" for kind in ("codes", "scale", "zero_point")]
        readers = self._readers[bias.output[0]]
        readers.remove(convolution)
        if not readers:  # two convolutions may share it
            self._removed.add(id(bias))
        self._first.append(onnx.helper.make_node("DequantizeLinear", parameters, [name], axis=0))
        self._makers[name] = self._first[-1]
        convolution.input[2] = name

    def _is_code(self, name: str) -> bool:
        return name in self._makers and self._makers[name].op_type == "DequantizeLinear"

    def _is_activation(self, name: str) -> bool:
        # an embedding's codes come out of a Gather
        maker = self._makers.get(self._makers[name].input[0]) if self._is_code(name) else None
        return maker is not None and maker.op_type in ("QuantizeLinear", "Clip")

    def end_of(self, name: str) -> str:
        """Return the tensor behind the operations that a runtime computes on codes."""
        readers = self._readers.get(name, [])
        while len(readers) == 1 and readers[0].op_type in _FOLLOWS and name not in self._outputs:
            name = readers[0].output[0]
            readers = self._readers.get(name, [])
        return name

    def hand_on_codes(self, name: str) -> None:
        """Make all readers of a tensor read its codes."""
        readers = self._readers.get(name, [])
        if name in self._outputs or not readers:
            return
        if len(readers) == 1 and readers[0].op_type == "QuantizeLinear":
            return
        self._let_read(name, self._quantizer_of(name) or self._new_quantizer(name))

    def _quantizer_of(self, name: str) -> Any | None:
        """Return the quantiser that some layer has for a tensor: in 8 bits, of the widest range."""
        found = [node for node in self._readers.get(name, []) if node.op_type == "QuantizeLinear"]
        found = [node for node in found if self._dequantizer(node) is not None]
        return max(found, key=lambda node: float(self.constants[node.input[1]]), default=None)

    def _dequantizer(self, quantizer: Any) -> Any | None:
        readers = self._readers.get(quantizer.output[0], [])
        return next((node for node in readers if node.op_type == "DequantizeLinear"), None)

    def _new_quantizer(self, name: str) -> Any:
        import onnx

        codes, values = f"{name}_codes", f"{name}_values"
        parameters = [f"{name}_scale", f"{name}_zero_point"]
        quantizer = onnx.helper.make_node("QuantizeLinear", [name, *parameters], [codes])
        dequantizer = onnx.helper.make_node("DequantizeLinear", [codes, *parameters], [values])
        self._makers |= {codes: quantizer, values: dequantizer}
        self._readers |= {codes: [dequantizer], values: []}
        self._added[name] = [quantizer, dequantizer]
        self.new.append(name)
        return quantizer

    def _let_read(self, name: str, quantizer: Any) -> None:
        dequantizer: Any = self._dequantizer(quantizer)
        values = dequantizer.output[0]
        for reader in self._readers[name]:
            if reader is not quantizer:
                reader.input[:] = [values if entry == name else entry for entry in reader.input]
                self._readers.setdefault(values, []).append(reader)
        self._readers[name] = [quantizer]
        # a reader may come before the quantiser's own layer
        self._added[name] = [quantizer, dequantizer]

    def write(self) -> None:
        """Put nodes and constants into the graph, each quantiser right behind what makes its tensor."""
        import onnx

        moved = self._removed | {id(node) for nodes in self._added.values() for node in nodes}
        nodes = [
            *self._first,
            *(node for name in self._added if name not in self._makers for node in self._added[name]),
        ]
        for node in self._graph.node:
            if id(node) not in moved:
                nodes += [node, *(added for name in node.output for added in self._added.get(name, []))]
        copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
        del self._graph.node[:]
        self._graph.node.extend(copies)
        unused = self._readers.keys() - {name for node in copies for name in node.input}
        del self._graph.initializer[:]
        self._graph.initializer.extend(
            onnx.numpy_helper.from_array(value, name) for name, value in self.constants.items() if name not in unused
        )
