"""FP8 training in the Hugging Face Trainer.

A GPU with FP8 products runs it natively. Other devices emulate the same numbers: they show accuracy, not speed.
"""

from digits_hf import arguments, splits, vision_transformer
from transformers import Trainer

from efftrain.hf import Fp8

if __name__ == "__main__":
    fp8 = Fp8(recipe="rowwise")
    trainer = Trainer(vision_transformer(), arguments(num_train_epochs=6), callbacks=[fp8], **splits())
    trainer.train()

    report = fp8.session.receipt()["techniques"]["fp8"]
    print(f"{report['layers']} layers in FP8, accuracy {trainer.evaluate()['eval_accuracy']:.3f}")
