"""Pruning and shared weights in the Hugging Face Trainer: a file of a few kilobytes, and what it costs.

Data: the 1,797 handwritten digits of scikit-learn. Run: python examples/hf/weight_clustering.py
"""

import tempfile
from pathlib import Path

from digits_hf import make_trainer, train, vision_transformer

from hf_eff import Pruning, WeightClustering
from shared_core.tools.compression import compress, decompress

if __name__ == "__main__":
    techniques = {
        "dense": [],
        "shared": [WeightClustering(bits=5, begin=0.6)],
        "pruned, shared": [Pruning(sparsity=0.8, end=0.5), WeightClustering(bits=5, begin=0.6)],
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, callbacks in techniques.items():
            trainer, accuracy = train(folder, None, callbacks, num_train_epochs=8)
            file = Path(folder, "model.eff")
            compress(trainer.model.state_dict(), file, bits_of={} if callbacks else {"*": None})
            restored = vision_transformer()
            restored.load_state_dict(decompress(file))
            again = make_trainer(folder, restored).evaluate()["eval_accuracy"]
            print(f"{name:16}accuracy {accuracy:.3f}, restored {again:.3f}, file {file.stat().st_size:7,} bytes")
