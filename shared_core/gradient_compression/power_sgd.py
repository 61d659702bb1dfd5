"""PowerSGD: average gradients over processes as products of two thin matrices, with error feedback."""

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

    ``M = gradient + e``; ``P = orthogonal(mean(M Q))``; ``Q = mean(Mᵀ P)``; the average is ``P Qᵀ``. The error
    ``e = M − P Qᵀ`` is added to the next gradient, and `Q` is kept for the next step.

    Torch's hook stores `e` and `Q` per bucket, but DDP rebuilds its buckets after the first step, also in a resumed
    run. Here they belong to parameters, so that resuming is exact and buckets do not matter.

    Args:
        parameters: The parameters that may be compressed, by name. Those with fewer than two axes, or that would not
            shrink to half or less, are sent whole.
        rank: Number of columns of `P` and `Q`, at least 1.
        seed: Seed of the first `Q`, the same on every process.

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
        """Names of the parameters that are sent as a product."""
        self.errors: dict[str, Tensor] = {}
        """This process's compression errors so far, by name; shape (rows, columns), float32 or wider."""
        self.queries: dict[str, Tensor] = {}
        """`Q` of the last step, by name; shape (columns, rank), the same on every process."""

    def _shrinks(self, parameter: Tensor) -> bool:
        if parameter.dim() < 2 or parameter.numel() == 0:
            return False
        rows, columns = parameter.flatten(1).shape
        # At least half the bytes must be saved, as in torch's own hook (min_compression_rate 2). Smaller savings are
        # not worth the error.
        return 2 * (rows + columns) * self._rank < rows * columns

    def reduce(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> tuple[Future[Any], int]:
        """Overwrite the gradients by their average. Return a future of this, and the bytes that this process sends."""
        names = [self._name_of[parameter] for parameter in parameters]
        whole = [gradient for name, gradient in zip(names, gradients, strict=True) if name not in self.compressed]
        low = {name: gradient for name, gradient in zip(names, gradients, strict=True) if name in self.compressed}
        # DDP passes the gradients as views of its bucket. Those sent whole (biases, norms) go as one tensor.
        flat = torch.cat([gradient.flatten() for gradient in whole]) if whole else gradients[0].new_empty(0)
        # Started first, so that it is sent while the products are computed.
        sending = dist.all_reduce(flat, async_op=True).get_future()
        if flat.device.type == "cpu":
            # gloo calls back from its own threads, so processes could start their collectives in different orders.
            sending.wait()
        # Error feedback: errors of earlier steps are added before compression, so they are sent later and never
        # dropped.
        matrices = self._with_errors(low)
        # Q of the last step is a warm start: one subspace iteration per step is enough to follow the slowly changing
        # gradient.
        queries = {name: self._query(name, matrix) for name, matrix in matrices.items()}
        # P = M Q on this process. The product is linear, so the mean over processes is that of the mean M.
        left = [matrices[name] @ queries[name] for name in low]
        right: list[Tensor] = []

        def reduce_left(future: Future[Any]) -> None:
            # Futures instead of waiting, so that DDP continues with backward, in the order of the buckets.
            flat.div_(world_size())
            if whole:
                torch._foreach_copy_(whole, _cut(flat, whole))
            left[:] = _summed(left)

        def reduce_right(future: Future[Any]) -> None:
            # The sum spans the same space as the mean.
            left[:] = [torch.linalg.qr(product).Q for product in left]
            # Q = M^T P with orthonormal P: the projection of M's rows. The division for its mean follows below.
            right[:] = _summed([matrix.T @ product for matrix, product in zip(matrices.values(), left, strict=True)])

        def multiply(future: Future[Any]) -> None:
            if not low:
                return
            # Keep the mean for the next step. All processes have the same sums, so all keep the same Q.
            torch._foreach_div_(right, world_size())
            self.queries |= zip(low, right, strict=True)
            for gradient, product, query in zip(low.values(), left, right, strict=True):
                # In place, because DDP later reads the bucket that this gradient is a view of.
                gradient.copy_((product @ query.T).view(gradient.shape))
            # The error includes rounding to the gradient's own dtype.
            torch._foreach_sub_([*matrices.values()], [gradient.flatten(1) for gradient in low.values()])
            self.errors |= matrices

        sent = flat.nbytes + sum(product.nbytes for product in left) + sum(query.nbytes for query in queries.values())
        return sending.then(reduce_left).then(reduce_right).then(multiply), sent

    def _with_errors(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        matrices = {}
        for name, gradient in gradients.items():
            # In float32 or wider, because a 16-bit gradient's error is below its last bit.
            wide = torch.promote_types(gradient.dtype, torch.float32)
            # Copied, because M later becomes the error in place, after the gradient was overwritten.
            matrices[name] = gradient.detach().flatten(1).to(wide, copy=True)
        if known := [name for name in gradients if name in self.errors]:
            errors = [self.errors[name].to(matrices[name]) for name in known]
            torch._foreach_add_([matrices[name] for name in known], errors)
        return matrices

    def _query(self, name: str, matrix: Tensor) -> Tensor:
        if name in self.queries:
            return self.queries[name].to(matrix)
        # Drawn on the CPU, so all devices draw the same. Seeded by position, as trainers may prefix names.
        generator = torch.Generator().manual_seed(self._seed + zlib.crc32(str(self._places[name]).encode()))
        # QR gives min(rows, rank) orthonormal columns, so a larger rank would change the shape.
        columns, rank = matrix.shape[1], min(self._rank, *matrix.shape)
        return torch.randn(columns, rank, generator=generator, dtype=matrix.dtype).to(matrix.device)

    def share_errors_(self) -> None:
        """Replace the errors on every process by their mean. Every process must call it.

        Only the mean of the errors affects the averaged gradients, so training does not change, up to rounding. Thus a
        checkpoint needs only one copy, and can be resumed with any number of processes.
        """
        # Sorted, because errors are in bucket order and all processes must call their collectives in the same order.
        for name in sorted(self.errors):
            all_reduce_(self.errors[name], "sum").div_(world_size())

    def forget(self) -> None:
        """Drop errors and `Q` after a step with NaN or infinity, which would stay in both forever."""
        self.errors, self.queries = {}, {}


def _summed(matrices: list[Tensor]) -> list[Tensor]:
    # Cloned, because products may differ in the last bit with memory alignment, which depends on DDP's buckets.
    if not matrices:
        return []
    flat = all_reduce_(torch.cat([matrix.flatten() for matrix in matrices]), "sum")
    return [part.clone() for part in _cut(flat, matrices)]


def _cut(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    pieces = torch.split(flat, [tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]
