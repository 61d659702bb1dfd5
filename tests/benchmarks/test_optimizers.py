"""The table of optimizers is the committed results, and a recount refuses runs that a technique did not change."""

import json

import optimizer_cells
import optimizers
import pytest
import torch
from optimizer_cells import CHECKS, Cell, CellError
from optimizer_kinds import Kind
from optimizer_runs import Net, train


def test_the_page_has_every_cell_and_none_fails():
    results = dict(json.loads(line) for line in optimizers.FILE.read_text().splitlines())
    kinds = {name.rpartition(" x ")[0] for name in results}
    ran = {kind for kind in kinds if results[f"{kind} x {optimizers.PLAIN}"]["status"] == "works"}
    assert {f"{kind} x {technique}" for kind in ran for technique in CHECKS} <= set(results), "run `make optimizers`"
    statuses = {found["status"] for name, found in results.items() if not name.endswith(f" x {optimizers.PLAIN}")}
    assert statuses == {"works", "refused"}
    assert optimizers.page_text(results) in optimizers.PAGE.read_text(encoding="utf-8"), "run `make optimizers`"


@pytest.fixture(scope="module")
def cell(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    kind = Kind("torch.optim", "SGD", lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    return Cell(kind, folder, train(kind, Net(), folder / "plain"))


@pytest.mark.parametrize("technique", CHECKS)
def test_a_run_without_the_technique_is_no_result(cell, technique, monkeypatch):
    def without(kind, net, folder, recipe=None, resume=None):
        return train(kind, net, folder, {}, resume)

    monkeypatch.setattr(optimizer_cells, "train", without)
    with pytest.raises(CellError):
        CHECKS[technique](cell)


@pytest.mark.parametrize("technique", CHECKS)
def test_sgd_works(cell, technique):
    CHECKS[technique](cell)
