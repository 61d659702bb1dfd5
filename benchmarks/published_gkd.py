"""GKD as TRL's `examples/scripts/gkd.py` has it, which the package lacks."""

from datasets import load_dataset
from transformers import AutoTokenizer
from trl import ModelConfig, ScriptArguments, TrlParser
from trl.experimental.gkd import GKDConfig, GKDTrainer

if __name__ == "__main__":
    script, training, model = TrlParser((ScriptArguments, GKDConfig, ModelConfig)).parse_args_and_config()
    data = load_dataset(script.dataset_name, name=script.dataset_config)
    trainer = GKDTrainer(
        model=model.model_name_or_path,
        teacher_model=training.teacher_model_name_or_path,
        args=training,
        train_dataset=data[script.dataset_train_split],
        processing_class=AutoTokenizer.from_pretrained(model.model_name_or_path),
    )
    trainer.train()
    trainer.save_model(training.output_dir)
