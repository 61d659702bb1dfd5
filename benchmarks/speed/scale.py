"""Compare `eff plan` with what two gloo processes hold and send: ``python benchmarks/speed/scale.py``.

Held bytes are those of all live tensors after a few steps, sent bytes those of the arguments of c10d's operators.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shared_core import Session
from shared_core.contrib.planning import ModelShape, PlannedRun, plan
from shared_core.engine.recipe import Recipe

LAYERS, HIDDEN, VOCAB, TOKENS = 4, 128, 256, 32
RECIPES: dict[str, dict[str, Any]] = {
    "none": {},
    "prune": {"prune": {"sparsity": 0.5, "begin": 0.1, "end": 1.0, "every": 1}},
    "prune movement": {"prune": {"sparsity": 0.5, "criterion": "movement", "begin": 0.1, "end": 1.0, "every": 1}},
    "average ema": {"average": {"kind": "ema", "begin": 1}},
    "average last_k": {"average": {"kind": "last_k", "k": 3, "begin": 1}},
    "qat": {"qat": {"scheme": "int8"}},
    "cluster": {"cluster": {"bits": 4, "begin": 2, "min_size": 64}},
}
DDP_ALONE = ("prune movement", "cluster")
STEPS = 6


class Block(nn.Module):
    """A residual block with ``12·h²`` parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False), nn.Linear(4 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream, `[batch, tokens, h]`."""
        query, key, value = self.mix(x).chunk(3, dim=-1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(query, key, value))
        return x + self.down(self.up(x).relu())


class Decoder(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, `[batch, tokens, V]`."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class Sent(TorchDispatchMode):
    """Counts what this rank sends, as ring algorithms would."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.bytes = ranks, 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, and go on."""
        name = str(function)
        if name.startswith("c10d."):
            tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor)]
            largest = max((t.nbytes for t in tensors), default=0)
            passes = 2 if "allreduce" in name else 1
            self.bytes += passes * (self.ranks - 1) / self.ranks * largest
        return function(*args, **(kwargs or {}))


def held() -> int:
    """Return the bytes of all live tensors, each storage once."""
    gc.collect()
    sizes = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter) or type(thing).__name__ == "DTensor":
            local = thing.to_local() if hasattr(thing, "to_local") else thing
            storage = local.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def measure(recipe: dict[str, Any], strategy: str) -> dict[str, float]:
    """Return held bytes and bytes sent in a step of this rank."""
    torch.manual_seed(0)
    before = held()
    model: nn.Module = Decoder()
    session = Session(Recipe.from_dict(recipe))
    session.attach(model)
    wrapped: nn.Module = model
    if strategy == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    elif strategy == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block)  # type: ignore[arg-type]
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    session.begin([optimizer], total_steps=STEPS + 2)
    counted: list[float] = []
    for _ in range(STEPS):
        tokens = torch.randint(VOCAB, (2, TOKENS))
        with Sent(dist.get_world_size() if dist.is_initialized() else 1) as sent:
            loss = session.loss(nn.functional.cross_entropy(wrapped(tokens).flatten(0, 1), tokens.flatten()))
            loss.backward()
            session.before_step()
            optimizer.step()
            session.after_step()
        optimizer.zero_grad()
        counted.append(sent.bytes)
    del loss, tokens
    return {"held": float(held() - before), "sent": sorted(counted)[STEPS // 2]}


def predict(recipe: dict[str, Any], strategy: str, ranks: int) -> dict[str, float]:
    """Return what `eff plan` says of the same run."""
    embeddings = 2 * VOCAB * HIDDEN
    blocks = 12 * LAYERS * HIDDEN**2
    shape = ModelShape(params=blocks + embeddings, layers=LAYERS, hidden=HIDDEN, vocab=VOCAB, embeddings=embeddings)
    run = PlannedRun(ranks=ranks, strategy=strategy, precision="fp32", micro_batch=2, seq_len=TOKENS)  # type: ignore[arg-type]
    found = plan(shape, run, Recipe.from_dict(recipe))
    return {"held": found.held + found.host, "sent": found.sent}


def _rank(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    found = {
        f"{name}, {strategy}": {"measured": measure(recipe, strategy), "predicted": predict(recipe, strategy, 2)}
        for name, recipe in RECIPES.items()
        for strategy in ("ddp", "fsdp2")
        if not (strategy == "fsdp2" and name in DDP_ALONE)
    }
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()  # gloo may wait for ever in its teardown for a process that has gone
    dist.destroy_process_group()


def main() -> None:
    """Run both ranks and print the table."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [subprocess.Popen([sys.executable, "-P", __file__, str(rank), folder]) for rank in range(2)]
        if any([process.wait() for process in ranks]):
            raise SystemExit("scale: a rank failed")
        found = json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))
    print("| run | held kB | predicted | sent kB a step | predicted |\n|---|---|---|---|---|")
    for name, values in found.items():
        cells = [f"{values[kind][of] / 1e3:,.1f}" for of in ("held", "sent") for kind in ("measured", "predicted")]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        _rank(int(sys.argv[1]), Path(sys.argv[2]))
    else:
        main()
