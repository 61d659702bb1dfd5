"""Gradients sent in 16 bits, or as products of low rank, between two processes of the Hugging Face Trainer.

Data: the 1,797 handwritten digits of scikit-learn. Run: torchrun --nproc_per_node=2
examples/hf/gradient_compression.py; with a script of yours: torchrun --nproc_per_node=2 script.py --comm_hook bf16
"""

import os
import tempfile

from digits_hf import train

from hf_eff import GradientCompression

HOOKS = ({"hook": "bf16"}, {"hook": "powersgd", "rank": 2})


def main():
    with tempfile.TemporaryDirectory() as folder:
        lines = [f"{'whole':10}accuracy {train(folder + '/whole')[1]:.3f}"]
        for options in HOOKS:
            compression = GradientCompression(**options)
            _, accuracy = train(folder + "/" + options["hook"], None, [compression])
            report = compression.session.receipt()["techniques"]["comm"]
            lines.append(f"{options['hook']:10}accuracy {accuracy:.3f}, {report['ratio']:.1f} times fewer bytes a step")
        if os.environ["RANK"] == "0":
            print(*lines, sep="\n")


if __name__ == "__main__":
    main()
