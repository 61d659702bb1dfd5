"""Compute the epsilon of DP-SGD at a delta from noise multiplier, sample rate and number of steps."""

from __future__ import annotations

import functools
import logging
import math
import warnings
from collections.abc import Iterable
from typing import Any

from shared_core.errors import ConfigError
from shared_core.libraries import optional

Spending = tuple[float, float, int]
"""Noise multiplier, sample rate and number of steps."""


@functools.cache
def opacus(module: str) -> Any:
    """Import and return a module of Opacus."""
    handlers = list(logging.root.handlers)
    try:
        return optional(f"opacus.{module}", "privacy", "dp")
    finally:
        logging.root.handlers[:] = handlers  # opacus (1.6) calls logging.basicConfig


def classic_epsilon(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> float:
    """Return ε of DP-SGD from moments of the sampled Gaussian mechanism at integer orders (classic conversion).

    ``ε = min_α T/(α−1) · log Σₖ C(α,k) (1−q)^(α−k) q^k exp(k(k−1)/2σ²) + log(1/δ)/(α−1)``. Looser than
    `epsilon`. Papers before 2020 report this value.

    Args:
        noise_multiplier: σ, above 0.
        sample_rate: q, in (0, 1].
        steps: T, at least 0.
        delta: δ, in (0, 1).

    Source: Abadi et al. 2016, arXiv:1607.00133; Mironov et al. 2019, arXiv:1908.10530, eq. 6.

    Example:
        >>> round(classic_epsilon(4.0, 0.01, 10_000, 1e-5), 3)
        1.259
    """
    if noise_multiplier == 0:
        return math.inf

    # log E[(p/q)^order] of the sampled Gaussian at integer orders, by its binomial expansion (Mironov et al. 2019,
    # arXiv:1908.10530).
    def moment(order: int) -> float:
        if sample_rate == 1:
            return order * (order - 1) / (2 * noise_multiplier**2)
        terms = [
            math.log(math.comb(order, k))
            + (order - k) * math.log1p(-sample_rate)
            + k * math.log(sample_rate)
            + k * (k - 1) / (2 * noise_multiplier**2)
            for k in range(order + 1)
        ]
        # log-sum-exp, because single terms overflow float64 at small noise.
        return max(terms) + math.log(sum(math.exp(term - max(terms)) for term in terms))

    # Convert with ε = (moment · steps - log δ) / (order - 1) at the best order.
    return min((steps * moment(order) - math.log(delta)) / (order - 1) for order in range(2, 257))


@functools.lru_cache(maxsize=64)
def _divergences_of_a_step(noise_multiplier: float, sample_rate: float) -> Any:
    # Opacus takes 0.3 seconds for these, and a run asks for its epsilon at every log.
    rdp, orders = opacus("accountants.analysis.rdp"), opacus("accountants").RDPAccountant.DEFAULT_ALPHAS
    return rdp.compute_rdp(q=sample_rate, noise_multiplier=noise_multiplier, steps=1, orders=orders)


def _rdp_epsilon(history: list[Spending], delta: float) -> float:
    rdp, orders = opacus("accountants.analysis.rdp"), opacus("accountants").RDPAccountant.DEFAULT_ALPHAS
    divergences = sum(steps * _divergences_of_a_step(noise, rate) for noise, rate, steps in history)
    return float(rdp.get_privacy_spent(orders=orders, rdp=divergences, delta=delta)[0])


def epsilon(spent: Iterable[Spending], delta: float, accountant: str = "rdp") -> float:
    """Return ε of DP-SGD steps with Poisson sampling, computed by one of Opacus' accountants.

    Args:
        spent: Noise multiplier, sample rate in (0, 1] and number of steps of each part of the run.
        delta: δ, in (0, 1).
        accountant: ``"rdp"`` (Mironov et al. 2019, arXiv:1908.10530, converted as in arXiv:2004.00010), or ``"prv"``
            (Gopi et al. 2021, arXiv:2106.02848), of which the upper bound is returned.

    Raises:
        MissingExtraError: If Opacus is not installed.

    Example:
        >>> round(epsilon([(4.0, 0.01, 10_000)], 1e-5), 3)
        1.035
    """
    history = [part for part in spent if part[2]]
    if not history:
        return 0.0
    if any(noise == 0 for noise, _, _ in history):
        return math.inf
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the best order is the last one; the bound holds anyway
        if accountant == "rdp":
            return _rdp_epsilon(history, delta)
        counting = opacus("accountants").create_accountant(mechanism=accountant)
        counting.history = history
        try:
            return float(counting.get_epsilon(delta=delta))
        except ValueError:  # prv needs too long an array for so little noise; use rdp's bound
            return _rdp_epsilon(history, delta)


def noise_multiplier_for(
    target: float,
    sample_rate: float,
    steps: int,
    delta: float,
    *,
    accountant: str = "rdp",
    spent: Iterable[Spending] = (),
) -> float:
    """Return the smallest noise multiplier, to 0.1 %, with which `steps` more steps end at ε ≤ `target`.

    Args:
        target: ε, above 0.
        sample_rate: q, in (0, 1].
        steps: Number of remaining steps.
        delta: δ, in (0, 1).
        accountant: See `epsilon`.
        spent: Earlier steps, in the format of `epsilon`.

    Raises:
        ConfigError: If no noise up to 10⁴ is enough.

    Example:
        >>> round(noise_multiplier_for(1.035, 0.01, 10_000, 1e-5), 1)
        4.0
    """
    before = list(spent)

    def suffices(noise: float) -> bool:
        return epsilon([*before, (noise, sample_rate, steps)], delta, accountant) <= target

    # Bisect between a noise that is too small and one that suffices.
    low = 0.1
    if accountant != "rdp":  # prv is slow at small noise, and never needs more noise than rdp
        low = 0.7 * noise_multiplier_for(target, sample_rate, steps, delta, spent=before)
    high = low / 0.7
    while not suffices(high):
        low, high = high, 2 * high
        if high > 1e4:
            raise ConfigError(
                "dp",
                f"target_epsilon must be reachable with some noise, got {target} at delta {delta} for {steps} steps "
                f"of sample rate {sample_rate:.4g}",
                "use fewer steps, smaller batches or a larger epsilon",
            )
    # No accountant resolves 0.1 % of the noise.
    while high - low > 1e-3 * low:
        middle = (low + high) / 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high
