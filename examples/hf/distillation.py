"""Distillation in the Hugging Face Trainer: a small model that has few examples learns from a larger one's folder.

Data: the 1,797 handwritten digits of scikit-learn. Run: python examples/hf/distillation.py
"""

import tempfile

from digits_hf import digits, train, vision_transformer

from hf_eff import Distillation

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        teacher_trainer, teacher = train(folder + "/teacher", vision_transformer(64), num_train_epochs=12)
        teacher_trainer.save_model(folder + "/teacher")

        few = digits()[0][:200]
        options = {"examples": few, "num_train_epochs": 60}
        _, alone = train(folder + "/alone", vision_transformer(32, 1), **options)
        distillation = Distillation(teacher=folder + "/teacher", temperature=4.0, alpha=0.1)
        _, taught = train(folder + "/taught", vision_transformer(32, 1), [distillation], **options)
        print(f"teacher, 1,347 examples:                 accuracy {teacher:.3f}")
        print(f"student, 200 examples, by itself:        accuracy {alone:.3f}")
        print(f"student, 200 examples, with the teacher: accuracy {taught:.3f}")
