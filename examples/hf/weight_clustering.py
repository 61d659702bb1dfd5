"""Pruning and shared weights in the Hugging Face Trainer: a file of a few kilobytes."""

from pathlib import Path

from digits_hf import arguments, splits, vision_transformer
from transformers import Trainer

from efftrain.hf import Pruning, WeightClustering
from shared_core.tools.compression import compress, decompress

if __name__ == "__main__":
    callbacks = [Pruning(sparsity=0.8, end=0.5), WeightClustering(bits=5, begin=0.6)]
    trainer = Trainer(vision_transformer(), arguments(), callbacks=callbacks, **splits())
    trainer.train()

    file = Path(trainer.args.output_dir, "model.eff")
    compress(trainer.model.state_dict(), file)
    trainer.model.load_state_dict(decompress(file))
    kilobytes = 4 * trainer.model.num_parameters() / 1000, file.stat().st_size / 1000
    accuracy = trainer.evaluate()["eval_accuracy"]
    print(f"{kilobytes[0]:.0f} kB of weights -> a file of {kilobytes[1]:.0f} kB, accuracy {accuracy:.3f}")
