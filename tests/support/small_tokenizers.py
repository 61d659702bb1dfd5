"""Small tokenizers of the kinds that decoders have, trained on a text."""

import json

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

SPECIAL = ["<unk>", "<s>", "</s>"]


def byte_level(lines: list[str], split: str | None) -> Tokenizer:
    """Train BPE on bytes, which splits text by a regex, or as GPT-2 does."""
    made = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    parts = [] if split is None else [pre_tokenizers.Split(Regex(split), "isolated")]
    made.pre_tokenizer = pre_tokenizers.Sequence([*parts, level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        lines, trainers.BpeTrainer(vocab_size=480, initial_alphabet=alphabet, special_tokens=SPECIAL)
    )
    return made


def sentencepiece(lines: list[str]) -> Tokenizer:
    """Train BPE on characters that falls back to bytes, as Llama 2 has it."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    codes = [f"<0x{value:02X}>" for value in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=480, special_tokens=SPECIAL + codes, limit_alphabet=120, max_token_length=12
    )
    made.train_from_iterator(lines, trainer)
    described = json.loads(made.to_str())
    described["added_tokens"] = [token for token in described["added_tokens"] if token["content"] in SPECIAL]
    return Tokenizer.from_str(json.dumps(described))
