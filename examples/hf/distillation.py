"""Distillation in the Hugging Face Trainer: a small model with 200 examples learns from a larger one."""

from digits_hf import arguments, splits, vision_transformer
from transformers import Trainer

from efftrain.hf import Distillation

if __name__ == "__main__":
    data = splits()
    teacher = Trainer(vision_transformer(64), arguments(num_train_epochs=12), **data)
    teacher.train()
    teacher.save_model()
    accuracies = [teacher.evaluate()["eval_accuracy"]]

    data["train_dataset"] = data["train_dataset"][:200]
    for callbacks in ([], [Distillation(teacher=teacher.args.output_dir, temperature=4.0, alpha=0.1)]):
        student = Trainer(vision_transformer(32, 1), arguments(num_train_epochs=60), callbacks=callbacks, **data)
        student.train()
        accuracies.append(student.evaluate()["eval_accuracy"])
    print("accuracy: teacher {:.3f}, student alone {:.3f}, student with the teacher {:.3f}".format(*accuracies))
