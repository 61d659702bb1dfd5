"""Everything that writes files, each twice: an old version, then a new one, and what tells which of them is there."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from shared_core.checkpoint_formats import open_ingredient
from shared_core.checkpoint_formats.plain import read_deployment, write_deployment
from shared_core.distillation.mutual import PEER_FILE, Peers
from shared_core.distillation.teacher_cache.format import MANIFEST_FILE, Manifest
from shared_core.distillation.teacher_cache.writer import write_teacher_cache
from shared_core.engine.receipt import Receipt
from shared_core.engine.saving.state_file import load_state, save_state
from shared_core.files.journal import begin_list, damage_by_list, finish_list, read_object, write_object
from shared_core.lottery_ticket.config import RESULT_FILE, TICKET_FILE
from shared_core.lottery_ticket.ticket import RunFolder, Ticket, read_ticket, write_ticket
from shared_core.quantization.post_training.bit_allocation import BitPlan
from shared_core.soup.greedy import SoupResult, path_plot
from shared_core.soup.saving import save_soup, write_path
from shared_core.soup.scoring import Journal
from shared_core.tools.compression import CompressedFile, compress

SIZE = 20_000


def tensors(version):
    """Tensors that no compression makes small: of the old version few, of the new one many."""
    return {"w": torch.randn(SIZE if version else 100, generator=torch.Generator().manual_seed(version))}


def version_of(weights):
    """Return of which version tensors are, all of them compared."""
    version = int(weights["w"].numel() == SIZE)
    assert torch.equal(weights["w"], tensors(version)["w"])
    return version


def _text(version):
    return "new " * SIZE if version else "old"


class Writer:
    """What writes into a folder; by default a file of its own name."""

    def write(self, folder: Path, version: int) -> Any:
        raise NotImplementedError

    def version(self, folder: Path) -> int:
        """Return which version can be read; what is neither raises."""
        raise NotImplementedError

    def prepare(self, folder: Path) -> None:
        """Write the old version."""
        self.write(folder, 0)


@dataclass
class Simple(Writer):
    """A function that writes and one that reads."""

    writes: Any
    reads: Any

    def write(self, folder, version):
        self.writes(folder, version)

    def version(self, folder):
        return self.reads(folder)


class OnlyNew(Simple):
    """What must not exist before: its old version is that nothing is there."""

    def prepare(self, folder):
        self.write(folder, 1)  # and so what it is made of, beside the folder
        for out in folder.iterdir():
            shutil.rmtree(out) if out.is_dir() else out.unlink()

    def version(self, folder):
        return self.reads(folder) if any(file.name.startswith("out") for file in folder.iterdir()) else 0


def _ingredient(folder, kind):
    """Return an ingredient beside the folder that is watched."""
    source = folder.parent / f"{kind}-source"
    file = source / "a.ckpt" if kind == "ckpt" else source
    if source.exists():
        return open_ingredient(file)
    source.mkdir()
    if kind == "ckpt":
        torch.save({"state_dict": tensors(1), "epoch": 1, "global_step": 2}, file)
    else:
        save_file(tensors(1), source / "model.safetensors", metadata={"format": "pt"})
        (source / "config.json").write_text('{"model_type": "x"}')
    return open_ingredient(file)


def _read_soup(path):
    return version_of({"w": open_ingredient(path).tensor("w")})


def _journal(folder, version):
    journal = Journal(folder / "journal.json", [], {"options": "same"})
    journal.record("first", 1.0)
    if version:
        for number in range(3):
            journal.record(f"{number} " + _text(1)[:4000], 2.0)


def _journal_version(folder):
    journal = Journal(folder / "journal.json", [], {"options": "same"})
    assert journal.score("first") in (1.0, None)
    return int(journal.score("2 " + _text(1)[:4000]) == 2.0)


def _cache(folder, version):
    if version:
        teacher = nn.Linear(64, 65)
        nn.init.constant_(teacher.weight, 0.5), nn.init.constant_(teacher.bias, 0.0)
        batches = [torch.arange(64 * 8.0).reshape(8, 64) + 1000 * number for number in range(3)]
        write_teacher_cache(teacher, batches, folder, shard_bytes=2000, resume=True)


def _cache_version(folder):
    return int((folder / MANIFEST_FILE).exists() and Manifest.read(folder).complete)


def _result(folder, version):
    if version:
        RunFolder(folder).finish({"a": 1}, Ticket({}, tensors(1), 3))


def _result_version(folder):
    if not (folder / RESULT_FILE).exists():
        return 0
    assert read_object(folder / RESULT_FILE) == {"a": 1}
    return version_of(read_ticket(folder / TICKET_FILE).weights)


def _plan(folder, version):
    names = [f"layer{number}" for number in range(40 if version else 2)]
    BitPlan(dict.fromkeys(names, 4), dict.fromkeys(names, 10), cost=0.5).to_yaml(folder / "plan.yaml")


def _peers(folder, version):
    module = nn.Module()
    module.w = nn.Parameter(tensors(version)["w"])
    Peers([module], "").write(folder)


def _listed(folder, version):
    # a library writes in place between the two; the folder counts as damaged until the list is finished
    begin_list(folder)
    torch.save(tensors(version), folder / "a.pt")
    finish_list(folder)


def _listed_version(folder):
    return int(damage_by_list(folder) is None and version_of(torch.load(folder / "a.pt")))


def _decompress(folder, version):
    from shared_core.cli.compress import decompress

    source = folder.parent / "source.eff"
    if not source.exists():
        compress(tensors(1), source)
    decompress(file=source, out=folder / "out", as_json=True)


def _plot(folder, version):
    rows = [
        {"name": f"{row}", "order": row, "single": 0.5, "score": 0.5, "accepted": True, "reason": ""}
        for row in range(6 if version else 2)
    ]
    path_plot(SoupResult({}, ["0"], 0.5, rows), folder / "plot.svg")


def _plot_version(folder):
    text = (folder / "plot.svg").read_text()
    assert text.rstrip().endswith("</svg>")
    return int("xtick_6" in text)


WRITERS: dict[str, Writer] = {
    "state": Simple(
        lambda folder, version: save_state(folder, {"step": version, **tensors(version)}),
        lambda folder: version_of(load_state(folder)),
    ),
    "receipt": Simple(
        lambda folder, version: Receipt({"version": version, "text": _text(version)}).write(folder),
        lambda folder: Receipt.read(folder)["version"],
    ),
    "chain journal": Simple(
        lambda folder, version: write_object(folder / "chain.json", {"version": version, "text": _text(version)}),
        lambda folder: read_object(folder / "chain.json")["version"],
    ),
    "soup journal": Simple(_journal, _journal_version),
    "soup folder": OnlyNew(
        lambda folder, version: save_soup(tensors(1), _ingredient(folder, "hf"), folder / "out"),
        lambda folder: _read_soup(folder / "out"),
    ),
    "soup file": OnlyNew(
        lambda folder, version: save_soup(tensors(1), _ingredient(folder, "ckpt"), folder / "out.ckpt"),
        lambda folder: _read_soup(folder / "out.ckpt"),
    ),
    "soup path": Simple(
        lambda folder, version: write_path(folder, json.dumps({"version": version, "text": _text(version)})),
        lambda folder: read_object(folder / "soup_path.json")["version"],
    ),
    "plot": Simple(_plot, _plot_version),
    "ticket": Simple(
        lambda folder, version: write_ticket(folder / "t.safetensors", Ticket({}, tensors(version), version)),
        lambda folder: version_of(read_ticket(folder / "t.safetensors").weights),
    ),
    "lottery result": Simple(_result, _result_version),
    "compressed file": Simple(
        lambda folder, version: compress(tensors(version), folder / "model.eff"),
        lambda folder: version_of(dict(CompressedFile(folder / "model.eff").tensors())),
    ),
    "decompressed folder": OnlyNew(
        _decompress, lambda folder: version_of(load_file(folder / "out" / "model.safetensors"))
    ),
    "teacher cache": Simple(_cache, _cache_version),
    "peers": Simple(_peers, lambda folder: version_of(load_file(folder / PEER_FILE.format(1)))),
    "deployment": Simple(
        lambda folder, version: write_deployment(folder, {"version": version, "text": _text(version)}),
        lambda folder: read_deployment(folder)["version"],
    ),
    "bit plan": Simple(_plan, lambda folder: int(len(BitPlan.from_yaml(folder / "plan.yaml").bits) == 40)),
    "listed folder": Simple(_listed, _listed_version),
}
IN_PLACE = {"listed folder": {"a.pt"}}
"""What is written in place, by others, between two lists."""
