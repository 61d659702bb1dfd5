"""What a candidate's training leaves behind, without training: ``search_stage.py HERE STUDENT OUT``, no torch needed.

The loss grows as the model shrinks, layers count more than neurons. Files in HERE ask for mishaps, each once: ``die``,
``fail``, ``undistilled``, ``other``, ``other-bits``, ``kill-driver``, and ``hopeless``, a bad validation before a long
wait.
"""

import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path


def asked(here: Path, name: str) -> bool:
    order = here / name
    if order.exists():
        order.unlink()
        return True
    return False


def log(folder: Path, entries: list[dict[str, float]]) -> None:
    folder.mkdir(exist_ok=True)
    partial = folder / "state.part"
    partial.write_text(json.dumps({"log_history": entries}))
    partial.rename(folder / "trainer_state.json")


def main(here: Path, student: Path, out: Path) -> None:
    recipe = Path(os.environ["EFF_RECIPE"]).read_text()
    teacher = re.search(r"^  teacher: (.*)$", recipe, re.MULTILINE)
    assert teacher is not None
    assert (Path(teacher[1]) / "model.safetensors").is_file()
    name = out.parent.name if out.name == "run" else out.name
    with (here / "started").open("a") as file:
        file.write(f"{name}\n")
    if name != "uncut":
        if asked(here, "die"):
            os.kill(os.getpid(), signal.SIGKILL)
        if asked(here, "fail"):
            sys.stderr.write("the loss is NaN\n")
            raise SystemExit(7)
        if asked(here, "kill-driver"):
            os.kill(os.getppid(), signal.SIGKILL)
            raise SystemExit(1)
    config = json.loads((student / "config.json").read_text())
    loss = 1 / config["num_hidden_layers"] + 4 / config["intermediate_size"]
    is_hopeless = asked(here, "hopeless")
    entries = [{"step": 4, "eval_loss": 100.0 if is_hopeless else 2 * loss}]
    log(out / "checkpoint-4", entries)
    if is_hopeless:
        time.sleep(300)
    source = Path(teacher[1]) if asked(here, "other") else student
    shutil.copytree(source, out / "checkpoint-9")
    log(out / "checkpoint-9", [*entries, {"step": 9, "eval_loss": loss, "eval_accuracy": 1 - loss / 4}])
    bits = re.findall(r"^  - (.+):weight_bits=(\d)$", recipe, re.MULTILINE)
    if asked(here, "other-bits"):
        bits.pop()
    layers = [{"name": layer, "weight_bits": int(each)} for layer, each in bits]
    receipt = {
        "techniques": {"distill": {"batches": 0 if asked(here, "undistilled") else 3}, "qat": {"per_layer": layers}}
    }
    Path(os.environ["EFF_RECEIPT"]).write_text(json.dumps(receipt))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
