"""FP4 training: the e2m1 elements of MXFP4 and NVFP4, with scales along the contracted axis."""

from __future__ import annotations

import torch
from torch import Tensor

from shared_core.numerics import mx_round_to, nvfp4_round_to


class Mxfp4Cast:
    """MXFP4: 32 elements share a power of two; a block with a NaN or an infinity becomes NaN.

    Source: OCP Microscaling Formats (MX) 1.0; Rouhani et al. 2023, arXiv:2310.10537.
    """

    def cast(self, matrix: Tensor, role: str, record: bool) -> Tensor:
        """Return the values that MXFP4 holds.

        Example:
            >>> Mxfp4Cast().cast(torch.tensor([[1.0, 0.3, 7.0, 0.1]]), "input", False).tolist()
            [[1.0, 0.5, 6.0, 0.0]]
        """
        values = mx_round_to(matrix, "fp4_e2m1")
        return values if values.dtype == torch.float64 else values.float()


class Nvfp4Cast:
    """NVFP4: 16 elements share an e4m3 scale, and all of them the scale of the matrix, of its current amax.

    A NaN or an infinity makes the whole matrix NaN. Rounded to nearest, without Hadamard transforms.

    Source: NVIDIA 2025, *Pretraining Large Language Models with NVFP4*, arXiv:2509.25149.
    """

    def cast(self, matrix: Tensor, role: str, record: bool) -> Tensor:
        """Return the values that NVFP4 holds.

        Example:
            >>> Nvfp4Cast().cast(torch.tensor([[2688.0, 600.0, 100.0]]), "input", False).tolist()
            [[2688.0, 672.0, 0.0]]
        """
        return nvfp4_round_to(matrix, per_tensor_scale=None)
