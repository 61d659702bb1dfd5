"""A model that transformers cuts by its plan, alone and with FSDP2 around it, in gloo processes: as in one process."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from two_ranks import ranks_of, run_scripts

SCRIPT = Path(__file__).parents[2] / "support" / "trainers" / "hf_tensor_parallel.py"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    run_scripts([([SCRIPT, folder], {})], folder)
    return folder


@pytest.fixture(scope="module", params=[2, 4], ids=["tp", "fsdp2+tp"])
def several(request, one, tmp_path_factory):
    folder = tmp_path_factory.mktemp("several")
    shutil.copytree(one / "start", folder / "start")
    run_scripts(ranks_of(SCRIPT, folder, folder, number=request.param), folder)
    return folder


def test_files_are_those_of_one_process(one, several):
    losses = [json.loads((one / "told.json").read_text())["losses"]]
    losses += [json.loads(path.read_text())["losses"] for path in several.glob("told*.json")]
    for name in (path.parent.name for path in several.glob("*/final")):
        alone, parts = (load_file(folder / name / "final" / "model.safetensors") for folder in (one, several))
        assert alone.keys() == parts.keys()
        # one code more or less of a weight is 1e-3 and more
        torch.testing.assert_close(parts, alone, atol=1e-6, rtol=0, msg=name)
        zeros = [sum(int((value == 0).sum()) for value in weights.values()) for weights in (alone, parts)]
        assert zeros[0] == zeros[1]
        assert (zeros[0] > 1000) == name.startswith("prune average")
        in_loop = name.endswith("in a loop")
        receipts = [path.parent.name for path in (several / name).rglob("eff_receipt.json")]
        assert receipts == ["final" if in_loop else name]
        for told in () if in_loop else losses[1:]:
            assert told[name] == pytest.approx(losses[0][name], rel=1e-6)


def test_what_does_not_work_is_refused_at_start(several):
    for path in several.glob("told*.json"):
        told = json.loads(path.read_text())
        assert "qat with range lsq cannot be combined with tensor parallelism" in told["lsq"]
        assert "lora cannot be combined with tensor parallelism" in told["lora"]
        assert "parallelism_config must place all" in told["places"]
        assert not any(line.count("\n") for line in (told["lsq"], told["lora"], told["places"]))
