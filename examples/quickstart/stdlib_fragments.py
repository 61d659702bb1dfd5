"""Real data that is on every machine: fragments of Python's own standard library, labeled with their package.

A fragment is eight consecutive lines of a file, blank and trivial ones dropped. Files, not fragments, are dealt to the
three splits, so that no file is on two sides. Nothing is downloaded, and the same Python gives the same data.
"""

from __future__ import annotations

import random
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from shared_core.errors import ConfigError

SPLITS = {"train": 0.6, "validation": 0.15, "test": 0.25}
LINES_PER_FRAGMENT = 8
FRAGMENTS_PER_FILE = 64
MIN_FILES = 8
MIN_PACKAGES = 8
MAX_PACKAGES = 12
SPARE = "encodings"  # mostly code tables: used only where fewer than eight other packages are installed
LEFT_OUT = {"test", "site-packages", "__pycache__"}


@dataclass(frozen=True)
class Fragment:
    """One example: eight lines of `file` (relative to the standard library), and the package it comes from."""

    text: str
    label: int
    file: str


@dataclass(frozen=True)
class Fragments:
    """The labeled fragments of each split, and the package that each label names."""

    splits: dict[str, list[Fragment]]
    packages: list[str]

    def check(self) -> None:
        """Raise if a file is on two sides, or a package is missing from one."""
        files = {name: {fragment.file for fragment in split} for name, split in self.splits.items()}
        for name, split in self.splits.items():
            for other in files.keys() - {name}:
                if shared := files[name] & files[other]:
                    raise ConfigError(
                        f"data: a file must be in one split only, got {min(shared)} in {name} and {other}"
                    )
            if missing := set(range(len(self.packages))) - {fragment.label for fragment in split}:
                raise ConfigError(f"data: {name} has no fragment of {', '.join(self.packages[i] for i in missing)}")


def find_packages(library: Path) -> dict[str, list[Path]]:
    """Return the packages of a standard library that have enough files, most files first, with their files."""
    packages = {}
    for folder in sorted(library.iterdir()):
        if folder.name in LEFT_OUT or folder.name.startswith("_") or not (folder / "__init__.py").is_file():
            continue
        # Their own tests are left out: some distributions do not install them.
        files = [
            file
            for file in sorted(folder.rglob("*.py"))
            if not any("test" in part for part in file.relative_to(folder).parts[:-1])
        ]
        if len(files) >= MIN_FILES:
            packages[folder.name] = files
    names = sorted(packages, key=lambda name: (name == SPARE, -len(packages[name]), name))
    if len(names) > MIN_PACKAGES:
        names = [name for name in names if name != SPARE]
    if len(names) < MIN_PACKAGES:
        raise ConfigError(
            f"data: {library} must hold at least {MIN_PACKAGES} packages of {MIN_FILES} files or more, got {names}; "
            "install the whole standard library, or give --train_file, --validation_file and --test_file"
        )
    return {name: packages[name] for name in names[:MAX_PACKAGES]}


def fragments_of(file: Path, package: str) -> list[str]:
    """Return up to `FRAGMENTS_PER_FILE` fragments, evenly spread over the file.

    Lines with fewer than three letters say nothing, and lines that name the package give it away: both are dropped.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return []
    named = re.compile(rf"\b{re.escape(package)}\b", re.IGNORECASE)
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if len(re.findall(r"[A-Za-z]", line)) >= 3 and not named.search(line)]
    count = len(lines) // LINES_PER_FRAGMENT
    kept = min(count, FRAGMENTS_PER_FILE)
    starts = [LINES_PER_FRAGMENT * (index * count // kept) for index in range(kept)]
    return ["\n".join(lines[start : start + LINES_PER_FRAGMENT]) for start in starts]


def load_fragments(library: Path | None = None, seed: int = 2) -> Fragments:
    """Return the fragments of the running Python's standard library, its files dealt to the three splits.

    The files of each package are shuffled with `seed` and dealt by their number of fragments.
    """
    library = library or Path(sysconfig.get_paths()["stdlib"])
    found = find_packages(library)
    names = sorted(found)
    splits: dict[str, list[Fragment]] = {name: [] for name in SPLITS}
    for label, package in enumerate(names):
        texts = {file.relative_to(library).as_posix(): fragments_of(file, package) for file in found[package]}
        files = [file for file, fragments in texts.items() if fragments]
        random.Random(f"{seed} {package}").shuffle(files)
        total = sum(len(texts[file]) for file in files)
        counts = dict.fromkeys(SPLITS, 0)
        for file in files:
            # The split that is furthest behind its share takes the next file.
            side = max(SPLITS, key=lambda name: SPLITS[name] * total - counts[name])
            counts[side] += len(texts[file])
            splits[side] += [Fragment(text, label, file) for text in texts[file]]
    fragments = Fragments(splits, names)
    fragments.check()
    return fragments


def train_tokenizer(texts: list[str], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer made from these texts alone, with BERT's special tokens."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    ids = [(token, bpe.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    bpe.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ids
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, model_max_length=max_length, **dict(zip(names, special, strict=True))
    )
