"""Averages and merges of checkpoints: arithmetic against float64, ties, dtypes, refusals."""

import math
import warnings

import numpy as np
import pytest
import torch
from soup_runs import runs, same_bits

from shared_core.errors import CheckpointError, EffError
from shared_core.soup import greedy_soup, slerp_soup, task_vector_soup, uniform_soup

# --- averages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [None, [3.0, 1.0, 0.0, 7.5, 2.0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_mean_is_that_of_float64(dtype, weights):
    members = runs(5, dtype=dtype)
    soup = uniform_soup(members, weights)
    shares = torch.tensor(weights or [1.0] * 5, dtype=torch.float64)
    for name in members[0]:
        stacked = torch.stack([member[name].double() for member in members])
        expected = torch.tensordot(shares / shares.sum(), stacked, 1)
        assert soup[name].dtype == dtype
        eps = torch.finfo(dtype).eps if dtype != torch.float64 else 1e-15
        spread = stacked.abs().amax(0)
        tolerance = {torch.float32: 4 * eps, torch.float64: 8 * eps}.get(dtype, 0.51 * eps)  # halves: one rounding
        assert ((soup[name].double() - expected).abs() <= tolerance * spread + 1e-7 * (dtype == torch.float16)).all()


def test_a_disk_without_room_for_the_mean_changes_no_bit(monkeypatch):
    members = [{**run, "none": torch.empty(0, 3), "one": torch.tensor(0.1, dtype=torch.float64)} for run in runs(3)]
    soup = uniform_soup(members)

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    assert all(map(same_bits, soup.values(), uniform_soup(members).values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize("weights", [None, list(range(1, 17))])
def test_sixteen_equal_ingredients_keep_their_bits(dtype, weights):
    values = torch.cat([torch.randn(1000), torch.tensor([0.0, -0.0, 1e-30, 3.0, -1e-3])]).to(dtype)
    soup = uniform_soup([{"w": values.clone()} for _ in range(16)], weights)
    assert same_bits(soup["w"], values)


def test_inputs_are_left_alone_and_not_shared():
    members = runs(3)
    before = [{name: value.clone() for name, value in member.items()} for member in members]
    soup = uniform_soup(members)
    single = greedy_soup(members[:1], lambda weights: 1.0).state_dict
    for result in (soup, single):
        for value in result.values():
            value.zero_()
    assert all(
        torch.equal(was[name], member[name]) for was, member in zip(before, members, strict=True) for name in was
    )


def test_mixed_dtypes_are_averaged_in_float32_and_take_the_best_ones():
    members = [{"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([1.0078125, 4.0], dtype=torch.bfloat16)}]
    result = greedy_soup(members, lambda weights: float(weights["w"][1]) > 2)
    assert result.ingredients == ["ingredient 1", "ingredient 0"]
    assert result.state_dict["w"].dtype == torch.bfloat16
    result = greedy_soup(members, lambda weights: -float(weights["w"][1] > 3))
    assert result.state_dict["w"].dtype == torch.float32
    assert result.state_dict["w"].tolist() == [1.00390625, 3.0]


def test_integers_and_booleans_come_from_the_best():
    members = [
        {"w": torch.tensor([float(i)]), "count": torch.tensor(i), "flag": torch.tensor([i == 1])} for i in range(3)
    ]
    result = greedy_soup(members, lambda weights: -abs(float(weights["w"]) - 1.2))
    assert result.ingredients[0] == "ingredient 1"
    assert len(result.ingredients) == 1
    assert result.state_dict["count"] == 1
    assert result.state_dict["count"].dtype == torch.int64
    result = greedy_soup(members, lambda weights: 0.0)  # an evaluation that all pass
    assert result.state_dict["w"].item() == 1.0
    assert result.state_dict["count"] == 0
    assert not result.state_dict["flag"].item()
    assert uniform_soup(members)["count"] == 0


def test_ties_are_kept_and_averaged_once():
    def tied(value):
        shared = torch.full((4, 3), value)
        return {"embed": shared, "bias": torch.zeros(2), "head": shared}

    result = greedy_soup([tied(1.0), tied(2.0)], lambda weights: 0.0).state_dict
    assert result["embed"].data_ptr() == result["head"].data_ptr()
    assert result["embed"].unique().tolist() == [1.5]
    turned = dict(reversed(tied(2.0).items()))  # the order of names does not matter
    assert torch.equal(uniform_soup([tied(1.0), turned])["head"], result["head"])
    free = {name: value.clone() for name, value in tied(3.0).items()}
    with pytest.raises(CheckpointError, match="must be tied in all ingredients or in none"):
        uniform_soup([tied(1.0), free])


def test_non_contiguous_and_empty_tensors():
    members = [
        {"w": torch.randn(6, 4).t(), "none": torch.empty(0, 3), "scalar": torch.tensor(float(i))} for i in range(2)
    ]
    soup = uniform_soup(members)
    assert torch.allclose(soup["w"], (members[0]["w"] + members[1]["w"]) / 2, atol=1e-6)
    assert soup["none"].shape == (0, 3)
    assert soup["scalar"] == 0.5
    into = {"w": torch.zeros(6, 4).t(), "none": torch.empty(0, 3), "scalar": torch.tensor(0.0)}
    assert uniform_soup(members, into=into) is into
    assert torch.equal(into["w"], soup["w"])


def test_uniform_leaves_out_what_is_not_finite():
    members = runs(3)
    members[1]["b"][2] = math.inf
    with pytest.warns(UserWarning, match="ingredient 1 is left out: 'b'"):
        soup = uniform_soup(members)
    assert torch.allclose(soup["a"], (members[0]["a"] + members[2]["a"]) / 2)
    with pytest.raises(CheckpointError, match="at least one"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        uniform_soup([members[1]])


# --- merges -----------------------------------------------------------------------------------------------------------


def merged_in_float64(kind, base, members, weights, density, lambda_, kept):
    """One tensor's merge, after Yadav et al., sec. 4, and Yu et al., eq. 1 to 3, with mergekit's conventions.

    These are (generalized_task_arithmetic.py, sparsify.py): ties has normalize and no rescale, dare_* rescale to the L1
    norm and no normalize; ties keeps int(density * numel); signs are elected by the weighted sum, 0 counting as +.
    """
    start, sparse = np.float64(base), []
    for x, mask in zip(members, kept, strict=True):
        vector = np.float64(x) - start
        if kind == "ties" and density < 1:
            mask = np.zeros(vector.shape, bool)
            mask.flat[np.argsort(-np.abs(vector), axis=None, kind="stable")[: int(density * vector.size)]] = True
        left = vector * mask
        sparse.append(left if kind == "ties" else left * np.abs(vector).sum() / np.abs(left).sum())
    shares = np.reshape(weights, (-1,) + (1,) * start.ndim)
    weighted = np.stack(sparse) * shares
    if kind == "dare_linear":
        return start + lambda_ * weighted.sum(0)
    agrees = np.sign(weighted) == np.where(weighted.sum(0) >= 0, 1, -1)
    mixed = (weighted * agrees).sum(0)
    divisor = (shares * agrees).sum(0)
    return start + lambda_ * (mixed / np.where(divisor == 0, 1, divisor) if kind == "ties" else mixed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("density", [1.0, 0.4])
@pytest.mark.parametrize(("weights", "lambda_"), [(None, 1.0), ([0.5, 0.0, 2.0, 0.3], 0.7)])
@pytest.mark.parametrize("kind", ["ties", "dare_linear", "dare_ties"])
def test_task_vectors_are_merged_as_in_float64(kind, weights, lambda_, density, dtype):
    base, *members = ({**run, "step": torch.tensor(i)} for i, run in enumerate(runs(5, dtype=dtype)))
    options = {"density": density, "weights": weights, "lambda_": lambda_, "seed": 3}
    soup = task_vector_soup(members, base, kind, **options)
    assert soup["step"] == 1  # the first ingredient's
    for name in "ab":
        # merges of one with another base of zeros show which numbers DARE drops
        kept = [np.ones(base[name].shape, bool)] * 4
        if kind != "ties":
            ones = [{key: torch.ones_like(value) for key, value in base.items()}] * 4
            zeros = {key: torch.zeros_like(value) for key, value in base.items()}
            alone = [
                task_vector_soup(ones, zeros, kind, density=density, seed=3, weights=[float(i == j) for j in range(4)])
                for i in range(4)
            ]
            kept = [one[name].double().numpy() > 0 for one in alone]
        tensors = [member[name].double().numpy() for member in members]
        expected = merged_in_float64(
            kind, base[name].double().numpy(), tensors, weights or [1.0] * 4, density, lambda_, kept
        )
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype]
        assert soup[name].dtype == dtype
        np.testing.assert_allclose(soup[name].double().numpy(), expected, rtol=tolerance, atol=tolerance)


def test_what_dare_drops_depends_on_seed_place_and_name_only():
    def drop(seed=0, threads=1, order=1):
        torch.set_num_threads(threads)
        ones = {"v": torch.ones(70_000), "w": torch.ones(70_000)}
        members = [dict(list(ones.items())[::order])] * 2
        zeros = {name: torch.zeros(70_000) for name in ones}
        return task_vector_soup(members, zeros, "dare_linear", density=0.25, seed=seed, weights=[1.0, 2.0])

    threads = torch.get_num_threads()
    try:
        first = drop()
        for other in (drop(threads=4), drop(order=-1)):
            assert all(same_bits(first[name], other[name]) for name in first)
    finally:
        torch.set_num_threads(threads)
    assert not torch.equal(first["v"], drop(seed=1)["v"])
    assert not torch.equal(first["v"], first["w"])
    # each drops a quarter for itself: 4 to 12 stand for the sums of both, and the mean stays
    shares = {round(float(value)): float((first["v"] == value).float().mean()) for value in first["v"].unique()}
    assert shares == pytest.approx({0: 9 / 16, 4: 3 / 16, 8: 3 / 16, 12: 1 / 16}, abs=0.01)
    assert float(first["v"].mean()) == pytest.approx(3, rel=1e-6)


def test_ties_by_hand():
    base = {"w": torch.zeros(6), "one": torch.zeros(1), "none": torch.empty(0)}
    vectors = [[4.0, -1, 1, 3, 0, 1], [-6.0, -2, 1, -3, 0, 1], [1.0, 1, 1, 0, 0, 1]]
    members = [{"w": torch.tensor(vector), "one": torch.ones(1), "none": torch.empty(0)} for vector in vectors]
    soup = task_vector_soup(members, base, "ties", density=0.5)
    # of equal magnitudes the first stay; 3 - 3 elects +
    assert soup["w"].tolist() == [-6.0, -1.5, 1.0, 3.0, 0.0, 0.0]
    assert soup["one"].item() == 1.0  # at least one number of a tensor is kept


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("case", ["apart", "parallel", "opposite", "zero"])
def test_slerp_is_that_of_float64(case, t):
    generator = torch.Generator().manual_seed(0)
    one, two = torch.randn(2, 40, 3, generator=generator)
    two = {"apart": two, "parallel": one + 0.01 * two, "opposite": -2 * one, "zero": 0 * two}[case]
    soup = slerp_soup([{"w": one, "n": torch.tensor(1)}, {"w": two, "n": torch.tensor(2)}], t)
    v0, v1 = one.double().numpy(), two.double().numpy()
    # mergekit (slerp.py): a norm up to 1e-8 counts as 1; |cosine| > 0.9995 is the straight line
    norms = [norm if (norm := np.linalg.norm(v)) > 1e-8 else 1.0 for v in (v0, v1)]
    cosine = (v0 * v1).sum() / norms[0] / norms[1]
    expected = (1 - t) * v0 + t * v1
    if abs(cosine) <= 0.9995:
        angle = np.arccos(cosine)
        expected = (np.sin((1 - t) * angle) * v0 + np.sin(t * angle) * v1) / np.sin(angle)
    assert (abs(cosine) > 0.9995) == (case in ("parallel", "opposite"))
    np.testing.assert_allclose(soup["w"].double().numpy(), expected, rtol=1e-6, atol=1e-6)
    assert soup["n"] == 1


def test_merges_keep_ties_and_write_into_a_model():
    def tied(value):
        shared = torch.full((4, 3), value)
        return {"embed": shared, "head": shared}

    into = tied(9.0)
    assert task_vector_soup([tied(2.0), tied(4.0)], tied(1.0), "ties", density=1.0, into=into) is into
    assert into["head"].unique().tolist() == [3.0]
    soup = slerp_soup([tied(2.0), tied(4.0)])
    assert soup["embed"].data_ptr() == soup["head"].data_ptr()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda run: run.pop("b"), r"'b' in ingredient 0 but not in ingredient 1"),
        (lambda run: run.update(c=torch.ones(1)), r"'c' in ingredient 1 but not in ingredient 0"),
        (lambda run: run.update(b=torch.ones(6)), r"\(5,\) in ingredient 0 and \(6,\) in ingredient 1"),
        (lambda run: run.update(b=torch.ones(5, dtype=torch.int64)), "floating-point in all ingredients or in none"),
        (lambda run: run.update(b=3), "'b' must be a tensor, got int"),
    ],
)
def test_strangers_are_refused_by_name(change, match):
    members = runs(2)
    change(members[1])
    for call in (lambda: greedy_soup(members, lambda weights: 1 / 0), lambda: uniform_soup(members)):
        with pytest.raises(CheckpointError, match=match):
            call()


TWO = runs(2)
BAD = {**runs(1)[0], "b": torch.full((5,), math.nan)}


def ties(**change):
    return task_vector_soup(**{"ingredients": TWO, "base": runs(3)[2], "kind": "ties", "density": 0.5, **change})


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: uniform_soup(TWO, [1.0]), "weights must be one for each of 2"),
        (lambda: uniform_soup(TWO, [1.0, -1.0]), ">= 0"),
        (lambda: uniform_soup(TWO, [0.0, 0.0]), "not all be 0"),
        (lambda: uniform_soup(TWO, [1.0, math.nan]), "finite numbers"),
        (lambda: ties(density=0.0), r"density must be in \(0, 1\], got 0.0"),
        (lambda: ties(density=math.nan), "density must be a finite number"),
        (lambda: ties(lambda_=math.inf), "lambda must be a finite number"),
        (lambda: ties(kind="dare"), "kind must be one of ties, dare_linear, dare_ties"),
        (lambda: ties(weights=[1.0]), "one for each of 2"),
        (lambda: ties(ingredients=[]), "at least one checkpoint"),
        (lambda: ties(base={"a": torch.zeros(33, 7)}), "same tensors, got 'b'"),
        (lambda: ties(base=BAD), "base: 'b' must be finite"),
        (lambda: slerp_soup(runs(3)), "slerp must have two ingredients, got 3"),
        (lambda: slerp_soup(TWO, 1.5), r"t must be in \[0, 1\], got 1.5"),
        (lambda: slerp_soup([TWO[0], BAD]), "ingredient 1: 'b' must be finite"),
    ],
)
def test_what_cannot_be_averaged_or_merged_is_refused(call, match):
    with pytest.raises(EffError, match=match):
        call()
