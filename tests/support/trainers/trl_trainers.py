"""Trainers of TRL with small models, a word a token, and no network."""

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = 24


def tokenizer():
    words = models.WordLevel({"<pad>": 0, **{str(index): index for index in range(1, WORDS)}}, unk_token="<pad>")
    whole = Tokenizer(words)
    whole.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=whole, pad_token="<pad>", eos_token="1", padding_side="left")
    made.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return made


def rows_of(texts):
    """The columns that TRL takes of texts which are tokens already."""
    return Dataset.from_list([{name: text[name].tolist() for name in ("input_ids", "labels")} for text in texts])


def sft(make, folder, *, model=None, data=None, callbacks=None, **settings):
    """An SFTTrainer on texts of unlike length, in float32."""
    from trl import SFTConfig, SFTTrainer

    arguments = make.arguments(
        folder, SFTConfig, **{"bf16": False, "gradient_checkpointing": False, "max_length": None, **settings}
    )
    return SFTTrainer(
        model=model or make.language_model(), args=arguments, train_dataset=data or rows_of(make.texts(8)),
        processing_class=tokenizer(), callbacks=callbacks,
    )  # fmt: skip


def scorer(make, seed=0):
    return make.classifier(
        seed, num_labels=1, pad_token_id=0, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )


def sentences(make, count, start=0):
    return [
        "".join(f"{token} " for token in text["input_ids"][start : start + 3].tolist()) for text in make.texts(count)
    ]


def _dpo(make, kind, config, arguments, **given):
    pairs = {"prompt": sentences(make, 8), "chosen": sentences(make, 8, 2), "rejected": sentences(make, 8, 4)}
    return kind(
        ref_model=make.language_model(), args=arguments(config), train_dataset=Dataset.from_dict(pairs), **given
    )


def _kto(make, kind, config, arguments, **given):
    rated = {"prompt": sentences(make, 8), "completion": sentences(make, 8, 2), "label": [True, False] * 4}
    return kind(
        ref_model=make.language_model(), args=arguments(config), train_dataset=Dataset.from_dict(rated), **given
    )


def _reward(make, kind, config, arguments, **given):
    pairs = {"chosen": sentences(make, 8, 2), "rejected": sentences(make, 8, 4)}
    return kind(args=arguments(config), train_dataset=Dataset.from_dict(pairs), **given)


def _grpo(make, kind, config, arguments, **given):
    def length(completions, **kwargs):
        return [float(len(completion)) for completion in completions]

    settings = {"num_generations": 2, "max_completion_length": 4, "temperature": 1.0}
    return kind(
        reward_funcs=length, args=arguments(config, **settings),
        train_dataset=Dataset.from_dict({"prompt": sentences(make, 8)}), **given,
    )  # fmt: skip


def _distillation(make, kind, config, arguments, **given):
    return kind(
        teacher_model=make.language_model(5), args=arguments(config, max_completion_length=4),
        train_dataset=Dataset.from_dict({"prompt": sentences(make, 8)}), **given,
    )  # fmt: skip


def _gkd(make, kind, config, arguments, **given):
    chats = [[{"role": "user", "content": asked}, {"role": "assistant", "content": told}]
             for asked, told in zip(sentences(make, 8), sentences(make, 8, 2), strict=True)]  # fmt: skip
    return kind(
        teacher_model=make.language_model(5), args=arguments(config, max_new_tokens=4, lmbda=0.5),
        train_dataset=Dataset.from_dict({"messages": chats}), **given,
    )  # fmt: skip


BUILDERS = {"DPO": _dpo, "KTO": _kto, "Reward": _reward, "GRPO": _grpo, "Distillation": _distillation, "GKD": _gkd}


def trainer_of(name, make, folder, model=None, **settings):
    """A trainer of TRL of this name, in float32, with few short sequences."""
    import trl
    import trl.experimental.gkd as gkd

    home = gkd if name == "GKD" else trl

    def arguments(config, **own):
        return make.arguments(folder, config, **{"bf16": False, "gradient_checkpointing": False, **own, **settings})

    model = model or (scorer(make) if name == "Reward" else make.language_model())
    kind, config = getattr(home, f"{name}Trainer"), getattr(home, f"{name}Config")
    return BUILDERS[name](make, kind, config, arguments, model=model, processing_class=tokenizer())
