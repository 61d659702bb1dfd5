"""Which axis of a weight counts outputs, and which inputs."""

from __future__ import annotations

from torch import nn

from shared_core.module_match import is_transformers_conv1d

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def output_axis(module: nn.Module) -> int:
    """Return the axis of ``module.weight`` along which the outputs lie.

    0 for linear layers and convolutions, 1 for transposed convolutions and transformers' ``Conv1D`` (GPT-2).

    Example:
        >>> output_axis(nn.Linear(4, 2)), output_axis(nn.ConvTranspose1d(4, 2, 3))
        (0, 1)
    """
    return int(isinstance(module, _TRANSPOSED) or is_transformers_conv1d(module))


def input_axis(module: nn.Module) -> int:
    """Return the axis of ``module.weight`` along which the inputs lie.

    Example:
        >>> input_axis(nn.Linear(4, 2))
        1
    """
    return 1 - output_axis(module)


def weight_of(name: str, module: nn.Module) -> nn.Parameter:
    """Return the weight that a module holds under the last part of a weight's name; recurrent layers hold several.

    Args:
        name: As in the model's state dict, such as ``encoder.weight_hh_l0``.
        module: Its holder.

    Raises:
        KeyError: If it has no such parameter.

    Example:
        >>> weight_of("encoder.weight_hh_l0", nn.GRU(2, 3)).shape
        torch.Size([9, 3])
    """
    weight = module._parameters[name.rpartition(".")[2]]
    if weight is None:
        raise KeyError(name)
    return weight
