"""The cached teacher: what is looked up is what the teacher said, whatever the order, padding and size of batches."""

import copy
import functools
import pickle
from concurrent.futures import ThreadPoolExecutor

import language_runs
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from shared_core.distillation.losses.divergences import kd_loss, kd_topk_sum
from shared_core.distillation.teacher_cache import TeacherCache, example_rows, top_k_targets, write_teacher_cache
from shared_core.errors import CheckpointError, ConfigError, TrainingError

VOCABULARY = 50


class TokenModel(nn.Module):
    """Logits of a position from its token alone, so that padding cannot reach them."""

    def __init__(self, vocabulary=VOCABULARY, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(4 * torch.randn(100, vocabulary, generator=generator))
        self.calls = 0

    def forward(self, input_ids, attention_mask=None):
        self.calls += 1
        return {"logits": self.table[input_ids]}


def sentences(count=23, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 12, (count,), generator=generator).tolist()
    return [torch.randint(1, 100, (length,), generator=generator) for length in lengths]


def padded(rows, *, left=False, extra=0, filler=0):
    length = max(map(len, rows)) + extra
    ids = torch.full((len(rows), length), filler)
    mask = torch.zeros(len(rows), length, dtype=torch.int64)
    for number, row in enumerate(rows):
        at = slice(length - len(row), length) if left else slice(0, len(row))
        ids[number, at], mask[number, at] = row, 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def batches_of(rows, size=5, **how):
    return [padded(rows[at : at + size], **how) for at in range(0, len(rows), size)]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store") / "cache"
    write_teacher_cache(TokenModel(), batches_of(sentences()), folder, top_k=7, dtype="float32", shard_bytes=1000)
    return folder


def expected(row, temperature=2.0, top_k=7):
    return top_k_targets(TokenModel().table.detach()[row], temperature=temperature, top_k=top_k)


def test_the_targets_are_the_softened_softmax_of_a_float64_reference(store):
    row = sentences()[3]
    targets = TeacherCache.open(store).lookup({"input_ids": row[None]})
    p = torch.softmax(TokenModel().table.detach()[row].double() / 2.0, dim=-1)
    top, indices = p.sort(descending=True)
    assert torch.equal(targets.indices[0], indices[:, :7])
    assert torch.allclose(targets.log_probs[0].double(), top[:, :7].log(), atol=1e-6)
    assert torch.allclose(targets.tail_log_mass[0].double(), top[:, 7:].sum(-1).log(), atol=1e-6)
    assert torch.equal(targets.tail_mass, targets.tail_log_mass.exp())


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("size", [1, 4, 23])
def test_order_size_of_batches_and_padding_do_not_matter(store, left, size):
    cache, rows = TeacherCache.open(store), sentences()
    assert len(cache.manifest.shards) > 3  # more than one file is read
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).tolist()
    for batch in batches_of([rows[at] for at in order], size, left=left, extra=3, filler=99):
        targets = cache.lookup(batch)
        assert [value.dtype for value in targets] == [torch.int64, torch.float32, torch.float32, torch.bool]
        assert torch.equal(targets.mask, batch["attention_mask"] == 1)
        for number, ids in enumerate(batch["input_ids"]):
            real = targets.mask[number]
            for got, want in zip(targets, expected(ids[real]), strict=False):
                assert torch.equal(got[number][real], want)
            assert targets.log_probs[number][~real].eq(0).all()


def test_without_a_mask_all_positions_are_real_and_integers_of_any_width_are_alike(store):
    cache, rows = TeacherCache.open(store), sentences()
    for row in rows[:5]:
        for inputs in ({"input_ids": row[None].int()}, {"input_ids": row[None], "attention_mask": None}):
            assert cache.lookup(inputs).mask.all()


def test_duplicates_are_kept_once_and_the_teacher_is_not_asked_again(tmp_path):
    teacher, rows = TokenModel(), sentences(8)
    twice = [*batches_of(rows, 4), *batches_of(rows, 4, left=True, extra=2), padded([rows[0], rows[0]])]
    manifest = write_teacher_cache(teacher, twice, tmp_path / "c", top_k=3)
    assert manifest.examples == len({tuple(row.tolist()) for row in rows}) == 8
    assert teacher.calls == 2
    assert manifest.rows == sum(map(len, rows))


def test_a_changed_example_is_refused_and_counted(store):
    cache, rows = TeacherCache.open(store), sentences()
    changed = [rows[0], rows[1].flip(0) + 0 if len(rows[1]) > 1 else rows[1] + 1, torch.tensor([5, 4, 3, 2, 1, 9])]
    with pytest.raises(CheckpointError, match=r"2 of 3 .*\(the first is number 1\)"):
        cache.lookup(padded(changed))
    assert cache.missing(padded(changed)).tolist() == [False, True, True]


def test_a_hole_in_the_mask_is_another_example():
    ids = torch.tensor([[1, 2, 3]])
    whole, hole = (
        example_rows({"input_ids": ids, "attention_mask": torch.tensor([mask])}, ["input_ids"]).keys
        for mask in ([1, 1, 1], [1, 0, 1])
    )
    assert whole != hole


def test_keys_tell_fields_dtypes_and_shapes_apart():
    def key(value, fields=("x",)):
        return example_rows({"x": value, "y": torch.ones(1, 2)}, fields).keys[0]

    values = [
        torch.zeros(1, 4),
        torch.zeros(1, 2, 2),
        torch.zeros(1, 4, dtype=torch.float64),
        torch.zeros(1, 4, dtype=torch.bfloat16),
        torch.zeros(1, 4, dtype=torch.int32),
        torch.zeros(1, 4, dtype=torch.bool),
        torch.zeros(1),
    ]
    keys = [key(value) for value in values] + [key(values[0], ("x", "y")), key(values[0], ("y",))]
    assert len(set(keys)) == len(keys)
    assert key(values[4]) == key(torch.zeros(1, 4, dtype=torch.int64))


def test_images_of_a_classifier_keep_all_classes_in_their_order(tmp_path):
    teacher, images = nn.Sequential(nn.Flatten(), nn.Linear(12, 10)), torch.randn(9, 3, 2, 2)
    teacher.train()
    manifest = write_teacher_cache(teacher, images.split(4), tmp_path / "c", temperature=3.0, dtype="float32")
    assert teacher.training
    assert (manifest.top_k, manifest.per_example, manifest.tail_mass_max) == (10, True, 0.0)
    order = torch.randperm(9)
    # the student's forward may call it anything
    targets = TeacherCache.open(tmp_path / "c").lookup({"pixels": images[order], "labels": torch.zeros(9)})
    assert targets.indices.shape == (9, 10)
    assert targets.mask.shape == (9,)
    assert torch.equal(targets.indices[0], torch.arange(10))
    logits = teacher(images[order]).detach()
    assert torch.allclose(targets.log_probs, torch.log_softmax(logits / 3.0, -1), atol=1e-6)
    assert targets.tail_log_mass.isneginf().all()
    student = torch.randn(9, 10)
    total, count = kd_topk_sum(
        student, targets.indices, targets.log_probs, temperature=3.0, tail_mass=targets.tail_mass
    )
    assert torch.allclose(total / count, kd_loss(student, logits, temperature=3.0), atol=1e-6)


def test_the_loss_of_the_top_k_is_that_of_the_full_distribution_with_merged_tails(store):
    batch = padded(sentences()[:4], left=True)
    targets = TeacherCache.open(store).lookup(batch)
    student = torch.randn(*batch["input_ids"].shape, VOCABULARY, requires_grad=True)
    loss, count = kd_topk_sum(
        student, targets.indices, targets.log_probs, temperature=2.0, tail_mass=targets.tail_mass, mask=targets.mask
    )
    loss.backward()
    assert student.grad[~targets.mask].eq(0).all()
    total = 0.0
    p = torch.softmax(TokenModel().table.detach()[batch["input_ids"]].double() / 2, -1)
    q = torch.softmax(student.detach().double() / 2, -1)
    for p_row, q_row in zip(p[targets.mask], q[targets.mask], strict=True):
        top = p_row.argsort(descending=True)
        p_k = torch.cat([p_row[top[:7]], p_row[top[7:]].sum()[None]])
        q_k = torch.cat([q_row[top[:7]], q_row[top[7:]].sum()[None]])
        total += 4 * (p_k * (p_k / q_k).log()).sum().item()
    assert loss.item() == pytest.approx(total, rel=1e-5)
    assert count == targets.mask.sum()


def test_outputs_that_follow_no_field_are_kept_whole(tmp_path):
    teacher, images = nn.Sequential(nn.Linear(6, 24), nn.Unflatten(1, (4, 6))), torch.randn(5, 6)
    manifest = write_teacher_cache(teacher, [images], tmp_path / "c", dtype="float32", top_k=2)
    assert manifest.positions is None
    targets = TeacherCache.open(tmp_path / "c").lookup(images[[2, 0]])
    assert torch.equal(targets.indices, teacher(images)[[2, 0]].topk(2).indices)
    assert targets.mask.all()


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(100, VOCABULARY, generator=torch.Generator().manual_seed(3)))

    def forward(self, input_ids, decoder_input_ids, attention_mask=None, decoder_attention_mask=None):
        return {"logits": self.table[decoder_input_ids] + self.table[input_ids].mean(1, keepdim=True)}


def test_positions_of_a_decoder_follow_its_own_inputs(tmp_path):
    sources, goals = sentences(6, 1), sentences(6, 2)

    def batch(rows, **how):
        there, here = padded([sources[row] for row in rows], **how), padded([goals[row] for row in rows], **how)
        decoder = {"decoder_input_ids": here["input_ids"], "decoder_attention_mask": here["attention_mask"]}
        return {"input_ids": there["input_ids"], "attention_mask": there["attention_mask"], **decoder}

    manifest = write_teacher_cache(Seq2Seq(), [batch([0, 1, 2]), batch([3, 4, 5])], tmp_path / "c", top_k=2)
    assert manifest.fields == ("input_ids", "decoder_input_ids")
    assert manifest.positions == "decoder_input_ids"
    asked = batch([5, 0], left=True)
    assert torch.equal(TeacherCache.open(tmp_path / "c").lookup(asked).mask, asked["decoder_attention_mask"] == 1)
    mixed = {
        **batch([5, 0]),
        "input_ids": batch([0, 5])["input_ids"],
        "attention_mask": batch([0, 5])["attention_mask"],
    }
    assert TeacherCache.open(tmp_path / "c").missing(mixed).all()


def test_only_labeled_positions(tmp_path):
    rows = [torch.arange(1, 7), torch.arange(3, 8)]
    batch = padded(rows)
    batch["labels"][:, :3] = -100
    manifest = write_teacher_cache(TokenModel(), [batch], tmp_path / "c", top_k=4, labeled=True, causal=True)
    assert manifest.rows == 3 + 2
    mask = TeacherCache.open(tmp_path / "c").lookup(padded(rows, left=True)).mask
    assert mask.int().tolist() == [[0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 0]]
    # the same inputs with other labels have no other place
    other = {**batch, "labels": batch["labels"].clone()}
    other["labels"][1, 2] = 3
    with pytest.raises(ConfigError, match="example 1 of batch 2"):
        write_teacher_cache(TokenModel(), [batch, other], tmp_path / "d", labeled=True, causal=True)
    with pytest.raises(ConfigError, match="needs batches with labels"):
        write_teacher_cache(TokenModel(), [{"input_ids": rows[0][None]}], tmp_path / "e", labeled=True)


def test_positions_that_count_must_be_stored(store, tmp_path):
    batch = padded(sentences()[:3])
    targets, real = TeacherCache.open(store).lookup(batch), batch["attention_mask"] == 1
    assert torch.equal(targets.counted(None), real)
    some = real & (torch.arange(real.shape[1]) > 0)
    assert torch.equal(targets.counted(some), some)
    wrong = some.clone()
    wrong[~real] = True
    with pytest.raises(TrainingError, match=f"{int((~real).sum())} of the {int(wrong.sum())} "):
        targets.counted(wrong)
    with pytest.raises(TrainingError, match="shape"):
        targets.counted(some[:, 1:])


def test_a_field_that_the_student_is_not_given_is_named(tmp_path):
    class Typed(TokenModel):
        def forward(self, input_ids, attention_mask=None, token_type_ids=None):
            return super().forward(input_ids)

    batch = {**padded(sentences(3)), "length": torch.ones(3)}
    batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
    del batch["labels"]
    write_teacher_cache(Typed(), [batch], tmp_path / "c")
    assert TeacherCache.open(tmp_path / "c").manifest.fields == ("input_ids", "token_type_ids")
    with pytest.raises(CheckpointError, match="must hold input_ids, token_type_ids, got input_ids, attention_mask"):
        TeacherCache.open(tmp_path / "c").lookup(padded(sentences(3)))
    write_teacher_cache(Typed(), [batch], tmp_path / "d", fields=["input_ids"])
    assert TeacherCache.open(tmp_path / "d").lookup(padded(sentences(3))).mask.any()


def test_an_empty_row_and_an_empty_batch(store, tmp_path):
    batch = padded(sentences(3))
    batch["attention_mask"][1] = 0
    write_teacher_cache(TokenModel(), [batch], tmp_path / "c")
    assert not TeacherCache.open(tmp_path / "c").lookup(batch).mask[1].any()
    nothing = {"input_ids": torch.zeros(0, 5, dtype=torch.int64)}
    assert TeacherCache.open(store).lookup(nothing).indices.shape == (0, 5, 7)


def test_check_refuses_what_differs_and_names_what_cannot_be_compared(tmp_path):
    told = {"tokenizer": "aa", "template": None}
    manifest = write_teacher_cache(TokenModel(), batches_of(sentences(4)), tmp_path / "c", fingerprints=told)
    cache = TeacherCache.open(tmp_path / "c")
    right = {"temperature": 2.0, "vocabulary": VOCABULARY, "tokenizer_fingerprint": "aa"}
    assert cache.check(**right) == ()
    assert cache.check(teacher_fingerprint=manifest.fingerprints["teacher"], template_fingerprint="bb") == ("template",)
    assert cache.check(data_fingerprint=manifest.fingerprints["data"]) == ()
    for wrong, match in [
        ({"temperature": 4.0}, "temperature must be the 2 that .* got 4"),
        ({"vocabulary": 51}, "must have the 50 classes of .* got 51"),
        ({"tokenizer_fingerprint": "bb"}, "tokenizer must be the one"),
        ({"teacher_fingerprint": "bb"}, "teacher must be the one"),
        ({"data_fingerprint": "bb"}, "data must be the one"),
    ]:
        with pytest.raises(CheckpointError, match=match):
            cache.check(**wrong)


def test_a_vocabulary_that_is_padded_is_cut_before_the_softmax(tmp_path):
    narrow, wide = TokenModel(), TokenModel()
    wide.table = nn.Parameter(torch.cat([narrow.table.detach(), torch.full((100, 6), 9.0)], dim=1))
    batch = padded(sentences(3))
    write_teacher_cache(narrow, [batch], tmp_path / "a", top_k=5)
    write_teacher_cache(wide, [batch], tmp_path / "b", top_k=5, vocabulary=VOCABULARY)
    one, other = (TeacherCache.open(tmp_path / name).lookup(batch) for name in "ab")
    assert all(torch.equal(got, want) for got, want in zip(one, other, strict=True))


@pytest.mark.parametrize("temperature", [0.005, 1.0, 50.0])
def test_extreme_logits_are_finite_and_an_impossible_class_stays_impossible(tmp_path, temperature):
    logits = torch.tensor([[1e4, -1e4, 0.0, -torch.inf, 3.0]])
    write_teacher_cache(nn.Identity(), [logits], tmp_path / "c", temperature=temperature, top_k=4)
    targets = TeacherCache.open(tmp_path / "c").lookup(logits)
    p = torch.softmax(logits.double() / temperature, -1).sort(descending=True).values
    assert torch.allclose(targets.log_probs.exp().double(), p[:, :4], atol=1e-3)
    assert targets.log_probs.isfinite().all()
    assert targets.tail_log_mass.isneginf().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_teacher_that_says_nan_is_refused(tmp_path, bad):
    with pytest.raises(TrainingError, match="finite or -inf"):
        write_teacher_cache(nn.Identity(), [torch.tensor([[1.0, bad]])], tmp_path / "c")


def test_threads_workers_and_copies_read_the_same(store):
    cache, rows = TeacherCache.open(store), sentences()
    want = cache.lookup(padded(rows))
    alike = pickle.loads(pickle.dumps(cache)).lookup(padded(rows))
    with ThreadPoolExecutor(4) as pool:
        every = list(pool.map(cache.lookup, [padded(rows)] * 16))

    def collate(numbers):
        return cache.lookup(padded([rows[number] for number in numbers], extra=12 - max(len(rows[n]) for n in numbers)))

    loader = DataLoader(range(len(rows)), batch_size=6, collate_fn=collate, num_workers=2)
    parts = [torch.cat(part) for part in zip(*loader, strict=True)]
    for targets in (alike, *every):
        assert all(torch.equal(got, there) for got, there in zip(targets, want, strict=True))
    assert torch.equal(parts[1][:, : want.log_probs.shape[1]], want.log_probs)


def _mapped_bytes(folder):
    """Return what of the files in a folder is in this process's memory."""
    total, ours = 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            if "-" in line.split(" ", 1)[0]:
                ours = str(folder) in line
            elif ours and line.startswith("Rss:"):
                total += 1024 * int(line.split()[1])
    return total


@pytest.mark.slow
def test_a_lookup_reads_its_rows_and_not_the_store(tmp_path):
    classes, images = 1000, torch.arange(30_000.0)[:, None]

    def teacher_logits(x):
        return torch.linspace(0, 1, classes) * (x % 7)

    teacher = nn.Identity()
    teacher.forward = teacher_logits
    folder = tmp_path / "c"
    write_teacher_cache(teacher, images.split(3000), folder, dtype="float32")
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert size > 100e6
    cache = TeacherCache.open(folder)
    targets = cache.lookup(images[[5, 29_000]])
    assert torch.allclose(targets.log_probs.exp().sum(-1), torch.ones(2))
    assert 0 < _mapped_bytes(folder) < size / 4


def soft_term_of_each_document(student, teacher, rows):
    """The mean over all predicted tokens, a document at a time and without padding, in float64."""
    student, teacher = (copy.deepcopy(model).double().eval() for model in (student, teacher))
    sums = []
    for row in rows:
        ids = torch.tensor([row])
        ours, theirs = student(ids).logits[0, :-1] / 2, teacher(ids).logits[0, :-1].detach() / 2
        p = theirs.softmax(-1)
        sums.append(4 * (p * (theirs.log_softmax(-1) - ours.log_softmax(-1))).sum(-1))
    loss = torch.cat(sums).mean()
    loss.backward()
    return {name: value.grad.float() for name, value in student.named_parameters()}


@pytest.mark.parametrize("front_end", ["bare", "hf"])
@pytest.mark.parametrize("student_side", ["left", "right"])
@pytest.mark.parametrize("writer_side", ["left", "right", None])
def test_padding_of_causal_models_may_be_on_either_side(front_end, student_side, writer_side, tmp_path):
    rows, teacher = language_runs.documents(), language_runs.llama(1, 3)
    if writer_side is None:
        taught = teacher
    else:
        batches = [language_runs.padded(rows[start : start + 4], writer_side) for start in (0, 4)]
        options = {"temperature": 2.0, "top_k": 24, "dtype": "float32", "labeled": True}
        write_teacher_cache(teacher, batches, tmp_path / "cache", **options)
        taught = f"cache:{tmp_path / 'cache'}"
    expected = soft_term_of_each_document(language_runs.llama(0), teacher, rows)
    # a loop averages over micro-batches, the Trainer over the labels of all of them
    size = {"bare": 6, "hf": 2}[front_end]
    window = language_runs.cut(rows, size, functools.partial(language_runs.padded, side=student_side))
    recipe = {"distill": {"teacher": taught, "alpha": 0.0}}
    found, _ = language_runs.gradients(front_end, language_runs.llama(0), recipe, window, tmp_path)
    assert language_runs.relative(found, expected) < 1e-5
