"""Loss scaling in the Hugging Face Trainer: fp16 training that finds its scale by itself."""

from digits_hf import arguments, splits, vision_transformer
from transformers import Trainer

from efftrain.hf import LossScaling

if __name__ == "__main__":
    scaling = LossScaling(kind="dynamic", init_scale=2.0**20, growth_interval=50)
    trainer = Trainer(vision_transformer(), arguments(fp16=True), callbacks=[scaling], **splits())
    trainer.train()

    receipt = scaling.session.receipt()
    steps, scale = receipt["steps"], receipt["techniques"]["loss_scale"]["scale"]
    print(
        f"{steps['applied']} steps applied, {steps['skipped']} skipped, scale 1048576 -> {scale:.0f}, "
        f"accuracy {trainer.evaluate()['eval_accuracy']:.3f}"
    )
