"""What a stage's training leaves behind, without training: ``chain_stage.py HERE SIZE OUT``, no torch needed.

Files in HERE ask for mishaps, each once: ``die``, ``fail``, ``undistilled``, ``unheard``, ``lost``, ``kill-driver``.
"""

import json
import os
import re
import signal
import struct
import sys
import time
from pathlib import Path


def asked(here: Path, name: str) -> bool:
    order = here / name
    if order.exists():
        order.unlink()
        return True
    return False


def write_safetensors(file: Path, size: int) -> None:
    tensors = {
        "weight": {"dtype": "F32", "shape": [size], "data_offsets": [0, 4 * size]},
        "norm.running_mean": {"dtype": "F32", "shape": [1], "data_offsets": [4 * size, 4 * size + 4]},
    }
    header = json.dumps(tensors).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4 * size + 4))


def size_of(folder: str) -> int:
    content = Path(folder, "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return int(json.loads(content[8 : 8 + length])["weight"]["shape"][0])


def main(here: Path, size: int, out: Path) -> None:
    told = re.search(r"^  teacher: (.*)$", Path(os.environ["EFF_RECIPE"]).read_text(), re.MULTILINE)
    teacher = told[1] if told else ""
    found = sorted(path.name for path in out.iterdir())
    with (here / "started").open("a") as file:
        file.write(json.dumps([out.name, size, Path(teacher).parent.name if teacher else None, found]) + "\n")
    (out / "half").touch()
    sys.stdout.write(f"training {out.name}\n")
    sys.stdout.flush()
    if teacher:
        if asked(here, "die"):
            os.kill(os.getpid(), signal.SIGKILL)
        if asked(here, "fail"):
            sys.stderr.write("first line\n" * 30 + "the loss is NaN\n")
            raise SystemExit(7)
        if asked(here, "kill-driver"):
            os.kill(os.getppid(), signal.SIGKILL)
            while not (here / "release").exists():
                time.sleep(0.02)
            raise SystemExit(1)
        if asked(here, "unheard"):
            raise SystemExit
        report = {"batches": 0 if asked(here, "undistilled") else 3, "teacher_parameters": size_of(teacher)}
        receipt = {"techniques": {"distill": report}, "validation": {"eval_f1": size / 100}}
        Path(os.environ["EFF_RECEIPT"]).write_text(json.dumps(receipt))
    folder = out / ("hidden" if asked(here, "lost") else "checkpoint-9")
    folder.mkdir(exist_ok=True)
    write_safetensors(folder / "model.safetensors", size)
    log = [{"step": 4, "eval_accuracy": 0.1}, {"step": 9, "eval_accuracy": size / 100, "eval_runtime": 3.0}]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": log}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
