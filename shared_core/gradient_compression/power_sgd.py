"""PowerSGD: gradients averaged over processes as products of two thin matrices, with error feedback."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from shared_core.distributed.collectives import all_reduce_, world_size


class PowerSgd:
    """Averages gradients over processes with one step of subspace iteration each.

    ``M = gradient + e``; ``P = orthogonal(mean(M Q))``; ``Q = mean(Mᵀ P)``; the average is ``P Qᵀ``, and what it left
    out, ``e = M − P Qᵀ``, is added to the next gradient. `Q` is kept for the next step.

    Torch's hook keeps `e` and `Q` by bucket, and DDP forms its buckets anew after the first step, a resumed run's too;
    here they belong to parameters, so that a resume is exact and the buckets do not matter.

    Args:
        parameters: By name, those that may be compressed. Sent whole is what has fewer than two axes, or would shrink
            to no less than half.
        rank: Columns of `P` and `Q`, at least 1.
        seed: Of the first `Q`, the same on every process.

    Source: Vogels, Karimireddy and Jaggi, 2019, arXiv:1905.13727.

    Example:
        >>> import torch
        >>> sorted(PowerSgd({"w": torch.zeros(8, 8), "b": torch.zeros(8)}, rank=1, seed=0).compressed)
        ['w']
    """

    def __init__(self, parameters: Mapping[str, Tensor], *, rank: int, seed: int) -> None:
        # Shapes below: a gradient as M (rows, columns), P (rows, rank), Q (columns, rank).
        self._rank, self._seed = rank, seed
        self._name_of = {parameter: name for name, parameter in parameters.items()}
        self._places = {name: place for place, name in enumerate(parameters)}
        self.compressed = {name for name, parameter in parameters.items() if self._shrinks(parameter)}
        """Names of what is sent as a product."""
        self.errors: dict[str, Tensor] = {}
        """By name, what this process's gradients lost so far; shape (rows, columns), float32 or wider."""
        self.queries: dict[str, Tensor] = {}
        """By name, `Q` of the last step; shape (columns, rank), the same on every process."""

    def _shrinks(self, parameter: Tensor) -> bool:
        if parameter.dim() < 2 or parameter.numel() == 0:
            return False
        rows, columns = parameter.flatten(1).shape
        # At least half the bytes must be saved, as in torch's own hook (min_compression_rate 2): below that the error
        # is not worth it.
        return 2 * (rows + columns) * self._rank < rows * columns

    def reduce(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> tuple[Future[Any], int]:
        """Return when the gradients are overwritten by their average, and the bytes that this process sends for it."""
        names = [self._name_of[parameter] for parameter in parameters]
        whole = [gradient for name, gradient in zip(names, gradients, strict=True) if name not in self.compressed]
        low = {name: gradient for name, gradient in zip(names, gradients, strict=True) if name in self.compressed}
        # DDP hands the gradients as views of its bucket. Those that are sent whole (biases, norms) go as one tensor.
        flat = torch.cat([gradient.flatten() for gradient in whole]) if whole else gradients[0].new_empty(0)
        # started first: it travels while the products are computed
        sending = dist.all_reduce(flat, async_op=True).get_future()
        if flat.device.type == "cpu":
            # gloo would call back from threads of its own, and processes could begin their collectives in other orders
            sending.wait()
        # Error feedback: what was lost in earlier steps is added before compression, so that it is sent later and
        # never dropped.
        matrices = self._with_errors(low)
        # Q of the last step is a warm start: one step of subspace iteration each time follows the slowly turning
        # gradient.
        queries = {name: self._query(name, matrix) for name, matrix in matrices.items()}
        # P = M Q of this process; the sum over processes is that of the mean M, as the product is linear.
        left = [matrices[name] @ queries[name] for name in low]
        right: list[Tensor] = []

        def reduce_left(future: Future[Any]) -> None:
            # A chain of futures, not waits: DDP goes on with backward meanwhile, in the order of the buckets.
            flat.div_(world_size())
            if whole:
                torch._foreach_copy_(whole, _cut(flat, whole))
            left[:] = _summed(left)

        def reduce_right(future: Future[Any]) -> None:
            # of a sum, which spans what the mean does
            left[:] = [torch.linalg.qr(product).Q for product in left]
            # Q = M^T P with orthonormal P: the projection of M's rows. Its mean over processes is divided for below.
            right[:] = _summed([matrix.T @ product for matrix, product in zip(matrices.values(), left, strict=True)])

        def multiply(future: Future[Any]) -> None:
            if not low:
                return
            # kept as the mean, for the next step. Every process has the same sums, so all keep the same Q.
            torch._foreach_div_(right, world_size())
            self.queries |= zip(low, right, strict=True)
            for gradient, product, query in zip(low.values(), left, right, strict=True):
                # In place: DDP goes on to read the bucket that this gradient is a view of.
                gradient.copy_((product @ query.T).view(gradient.shape))
            # what the gradient's own dtype rounded away is lost too
            torch._foreach_sub_([*matrices.values()], [gradient.flatten(1) for gradient in low.values()])
            self.errors |= matrices

        sent = flat.nbytes + sum(product.nbytes for product in left) + sum(query.nbytes for query in queries.values())
        return sending.then(reduce_left).then(reduce_right).then(multiply), sent

    def _with_errors(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        matrices = {}
        for name, gradient in gradients.items():
            # In float32 at least: an error of a 16-bit gradient lies below its last bit.
            wide = torch.promote_types(gradient.dtype, torch.float32)
            # copy: M becomes the error in place later, and the gradient is overwritten before that.
            matrices[name] = gradient.detach().flatten(1).to(wide, copy=True)
        if known := [name for name in gradients if name in self.errors]:
            errors = [self.errors[name].to(matrices[name]) for name in known]
            torch._foreach_add_([matrices[name] for name in known], errors)
        return matrices

    def _query(self, name: str, matrix: Tensor) -> Tensor:
        if name in self.queries:
            return self.queries[name].to(matrix)
        # on the CPU, so that every device draws the same; of the place, as no bucket matters and trainers prefix names
        generator = torch.Generator().manual_seed(self._seed + zlib.crc32(str(self._places[name]).encode()))
        # QR gives min(rows, rank) orthonormal columns: a larger rank would come back as another shape.
        columns, rank = matrix.shape[1], min(self._rank, *matrix.shape)
        return torch.randn(columns, rank, generator=generator, dtype=matrix.dtype).to(matrix.device)

    def share_errors_(self) -> None:
        """Give every process the mean of all errors; every process must call it.

        Only the mean enters an average of gradients, so training goes on as it would, up to rounding, and one copy is
        all that a checkpoint needs, whatever number of processes goes on from it.
        """
        # Sorted: errors were made in bucket order, and every process must call its collectives in the same one.
        for name in sorted(self.errors):
            all_reduce_(self.errors[name], "sum").div_(world_size())

    def forget(self) -> None:
        """Drop errors and `Q`: a step met NaN or infinity, which would stay in both for ever."""
        self.errors, self.queries = {}, {}


def _summed(matrices: list[Tensor]) -> list[Tensor]:
    # Cloned: products may differ in the last bit where memory is aligned otherwise, which DDP's buckets decide.
    if not matrices:
        return []
    flat = all_reduce_(torch.cat([matrix.flatten() for matrix in matrices]), "sum")
    return [part.clone() for part in _cut(flat, matrices)]


def _cut(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    pieces = torch.split(flat, [tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]
