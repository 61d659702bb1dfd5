"""Trainers of TRL with small models, a word a token, and no network."""

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = 24


def tokenizer():
    words = models.WordLevel({"<pad>": 0, **{str(index): index for index in range(1, WORDS)}}, unk_token="<pad>")
    whole = Tokenizer(words)
    whole.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=whole, pad_token="<pad>", eos_token="1", padding_side="left")


def rows_of(texts):
    """The columns that TRL takes of texts which are tokens already."""
    return Dataset.from_list([{name: text[name].tolist() for name in ("input_ids", "labels")} for text in texts])


def sft(make, folder, *, model=None, data=None, callbacks=None, trainer_class=None, peft_config=None, **settings):
    """An SFTTrainer on texts of unlike length, in float32."""
    from trl import SFTConfig, SFTTrainer

    arguments = make.arguments(
        folder, SFTConfig, **{"bf16": False, "gradient_checkpointing": False, "max_length": None, **settings}
    )
    return (trainer_class or SFTTrainer)(
        model=model or make.language_model(), args=arguments, train_dataset=data or rows_of(make.texts(8)),
        processing_class=tokenizer(), callbacks=callbacks, peft_config=peft_config,
    )  # fmt: skip
