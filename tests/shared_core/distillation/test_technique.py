"""Distillation driven as a bare loop does, on small nets."""

import copy
import pickle

import distillation_steps
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shared_core import Recipe, Session
from shared_core.distillation import Distillation, DistillConfig, kd_loss
from shared_core.distillation.teacher_cache import write_teacher_cache
from shared_core.engine.technique import Context
from shared_core.errors import CompatibilityError, ConfigError, EffError, MatchError, TrainingError
from shared_core.tools.explain import explain


def mlp(width=8, classes=3, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Dropout(0.5), nn.Linear(width, classes))


class Lines:
    """Services that load a given teacher and keep what is said."""

    def __init__(self, teacher=None):
        self.teacher, self.said, self.asked = teacher, [], []

    def load_teacher(self, name, student, *, trust_remote_code=False):
        self.asked.append((name, student))
        return self.teacher

    def tokenizer(self):
        return None

    def say(self, text):
        self.said.append(text)


def attached(model, teacher, services=None, **options):
    return distillation_steps.attached(model, teacher, services or Lines(), **options)


def forward(technique):
    return technique._hook.latest


class TestMixedLoss:
    @pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
    def test_formula_on_a_classifier(self, alpha):
        student, teacher = mlp(), mlp(16, seed=1)
        technique, context = attached(student, teacher, alpha=alpha, temperature=3.0)
        x, y = torch.randn(6, 4), torch.randint(3, (6,))
        logits = student(x)
        task = F.cross_entropy(logits, y)
        loss = technique.loss(task, context)
        with torch.no_grad():
            targets = teacher.eval()(x)
        expected = alpha * task + (1 - alpha) * kd_loss(logits, targets, temperature=3.0)
        torch.testing.assert_close(loss, expected)
        metrics = technique.figures()
        assert metrics["distill/task_loss"] == pytest.approx(task.item())
        assert metrics["distill/soft_loss"] == pytest.approx(kd_loss(logits, targets, temperature=3.0).item(), rel=1e-5)

    def test_the_weight_of_zero_silences_a_loss_that_is_not_finite(self):
        technique, context = attached(mlp(), mlp(16), alpha=0.0)
        context.model(torch.randn(2, 4))
        assert torch.isfinite(technique.loss(torch.tensor(float("nan")), context))

    def test_the_teacher_counts_from_begin_to_end(self):
        technique, context = attached(mlp(), mlp(16), begin=2, end=0.5)
        soft = []
        for step in range(10):
            context.step = step
            technique.after_step(context, True)
            task = context.model(torch.randn(3, 4)).sum()
            soft.append(technique.loss(task, context) is not task)
            assert forward(technique) is None
        assert soft == [False, False, True, True, True, False, False, False, False, False]

    def test_the_default_range_needs_no_number_of_steps(self):
        technique, context = attached(mlp(), mlp(16), total_steps=None)
        context.step = 10**6
        technique.after_step(context, True)
        task = context.model(torch.randn(3, 4)).sum()
        assert technique.loss(task, context) is not task
        with pytest.raises(ConfigError, match=r"distill\.end: 0\.5 must be a step number here"):
            attached(mlp(), mlp(16), total_steps=None, end=0.5)

    def test_figures_of_the_last_step_inside_are_not_logged_in_those_behind(self):
        # a run that is resumed behind the end has none either
        technique, context = attached(mlp(), mlp(seed=1), begin=0, end=1)
        technique.loss(technique._student(torch.randn(2, 4)).sum(), context)
        context.step = 1
        technique.after_step(context, True)
        assert technique.figures()
        technique.loss(technique._student(torch.randn(2, 4)).sum(), context)
        assert technique.figures() == {}

    @pytest.mark.parametrize(("begin", "end"), [(4, 4), (6, 0.5), (1.0, 10)])
    def test_an_empty_range_is_refused(self, begin, end):
        with pytest.raises(ConfigError, match="end"):
            attached(mlp(), mlp(16), begin=begin, end=end)


class TestTeacher:
    def test_it_stays_out_of_the_student_and_never_trains(self):
        student, teacher = mlp(), mlp(16, seed=1).train()
        keys, modules = list(student.state_dict()), len(list(student.modules()))
        before = copy.deepcopy(teacher.state_dict())
        technique, context = attached(student, teacher)
        optimizer = torch.optim.AdamW(student.parameters(), lr=0.1)
        for _ in range(3):
            teacher.train()  # a trainer that calls train() on everything
            loss = technique.loss(student(torch.randn(5, 4)).pow(2).mean(), context)
            loss.backward()
            optimizer.step()
            assert not any(module.training for module in teacher.modules())
        assert list(student.state_dict()) == keys
        assert len(list(student.modules())) == modules
        assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
        assert all(p.grad is None and not p.requires_grad for p in teacher.parameters())
        assert technique.state_dict() == {"batches": 3, "positions": 15}

    def test_dropout_of_the_student_does_not_depend_on_the_teacher(self):
        outputs = []
        for with_teacher in (False, True):
            student = mlp()
            technique, context = attached(student, mlp(16))
            torch.manual_seed(7)
            x = torch.ones(4, 4)
            first = student(x)
            if with_teacher:
                technique.loss(first.sum(), context)
            outputs.append(student(x))
        assert torch.equal(*outputs)

    def test_a_name_is_loaded_by_the_front_end(self):
        student, services = mlp(), Lines(mlp(16))
        technique, _ = attached(student, "runs/teacher", services)
        assert services.asked == [("runs/teacher", student)]
        assert technique.report()["teacher"] == "Sequential"

    def test_a_bare_loop_asks_for_a_module(self):
        technique = Distillation(DistillConfig(teacher="runs/teacher"))
        with pytest.raises(CompatibilityError, match="must be a module here, got 'runs/teacher'"):
            technique.attach(Context(mlp()))

    def test_a_saved_recipe_asks_for_the_module_again(self):
        saved = DistillConfig(teacher=mlp()).to_dict()["teacher"]
        with pytest.raises(ConfigError, match=r"teacher must be .* again, got '<Sequential>'"):
            attached(mlp(), saved)

    @pytest.mark.parametrize("share", ["itself", "part", "weights"])
    def test_it_must_share_no_weights_with_the_model(self, share):
        student, teacher = mlp(), mlp(16)
        if share == "itself":
            teacher = student
        elif share == "part":
            student.append(teacher)
        else:
            teacher[3].bias = student[3].bias
        with pytest.raises(CompatibilityError, match=r"share.* weights with the model"):
            attached(student, teacher)
        assert all(parameter.requires_grad for parameter in student.parameters())

    def test_a_smaller_teacher_is_pointed_out(self):
        services = Lines()
        technique, _ = attached(mlp(16), mlp(8), services)
        assert services.said == [
            "distill: the teacher has 67 parameters, fewer than the student's 131; distilling from it may not help"
        ]
        assert "smaller" in technique.report()["warning"]
        assert attached(mlp(8), mlp(16), quiet := Lines())
        assert quiet.said == []

    def test_under_autocast_both_run_in_its_dtype(self):
        student, teacher = mlp(), mlp(16)
        seen = []
        teacher.register_forward_hook(lambda *a: seen.append(a[2].dtype))
        technique, context = attached(student, teacher)
        with torch.autocast("cpu", torch.bfloat16):
            loss = technique.loss(student(torch.randn(2, 4)).float().sum(), context)
        assert seen == [torch.bfloat16]
        assert loss.dtype == torch.float32


class TestForwardHook:
    def test_a_student_that_was_not_called_is_an_error(self):
        technique, context = attached(mlp(), mlp(16))
        with pytest.raises(TrainingError, match="the student's forward must run before the loss"):
            technique.loss(torch.ones((), requires_grad=True), context)

    @pytest.mark.parametrize("how", ["eval", "no_grad"])
    def test_evaluation_is_not_captured(self, how):
        technique, context = attached(mlp(), mlp(16))
        context.model.train(how != "eval")
        with torch.set_grad_enabled(how != "no_grad"):
            context.model(torch.randn(2, 4))
        assert forward(technique) is None

    def test_what_was_captured_is_used_once(self):
        technique, context = attached(mlp(), mlp(16))
        technique.loss(context.model(torch.randn(2, 4)).sum(), context)
        assert forward(technique) is None
        context.model(torch.randn(2, 4))
        with technique.swapped(context, "evaluate"):
            pass
        assert forward(technique) is None

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_a_recomputed_forward_is_no_new_batch(self, reentrant):
        class Outer(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.net = nn.Linear(4, 4), mlp()

            def forward(self, x):
                return self.net(checkpoint(self.body, x, use_reentrant=reentrant))

        class Whole(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = mlp()

            def forward(self, x):
                return checkpoint(self.net, x, use_reentrant=False)

        for model in (Outer(), Whole()):
            technique, context = attached(model, mlp(16), student="net")
            # the input of a re-entrant checkpoint must require grad, or nothing inside gets any
            loss = technique.loss(model(torch.randn(2, 4, requires_grad=True)).sum(), context)
            loss.backward()
            assert forward(technique) is None
            assert technique.report()["batches"] == 1

    def test_a_submodule_as_student(self):
        class Task(nn.Module):
            def __init__(self):
                super().__init__()
                self.encoder, self.net = nn.Linear(4, 4), mlp()

            def forward(self, x, y):
                return F.cross_entropy(self.net(x), y)

        model, teacher = Task(), mlp(16)
        technique, context = attached(model, teacher, student="net")
        task = model(torch.randn(3, 4), torch.tensor([0, 1, 2]))
        assert technique.loss(task, context) > 0
        with pytest.raises(MatchError, match="student must name a submodule, got 'nett'; did you mean 'net'"):
            attached(Task(), teacher, student="nett")

    def test_detach_leaves_no_hook(self):
        student = mlp()
        technique, context = attached(student, mlp(16))
        technique.finish(context)
        context.undo.close()
        assert not student._forward_hooks
        assert not student._forward_hooks_with_kwargs
        assert technique.report()["teacher"] == "Sequential"
        technique.attach(context)
        assert len(student._forward_hooks) == 1

    def test_a_copied_or_pickled_student_carries_nothing_along(self):
        student = mlp()
        technique, context = attached(student, mlp(16))
        student(torch.randn(2, 4))
        recorded = forward(technique)
        assert recorded is not None
        for twin in (copy.deepcopy(student), pickle.loads(pickle.dumps(student))):
            twin(torch.randn(2, 4))
            assert forward(technique) is recorded
        assert technique.loss(torch.ones((), requires_grad=True), context) is not None

    def test_a_compiled_student(self):
        student, teacher = mlp(), mlp(16)
        technique, context = attached(student, teacher)
        compiled = torch.compile(student, backend="eager")
        for _ in range(2):
            technique.loss(compiled(torch.randn(3, 4)).sum(), context).backward()
        assert technique.report()["batches"] == 2


def test_counters_resume():
    technique, context = attached(mlp(), mlp(16))
    technique.loss(context.model(torch.randn(4, 4)).sum(), context)
    resumed, context = attached(mlp(), mlp(16))
    for _ in range(2):
        resumed.begin(context, technique.state_dict())
    resumed.loss(context.model(torch.randn(4, 4)).sum(), context)
    assert resumed.state_dict() == {"batches": 2, "positions": 8}
    assert resumed.figures().keys() == {"distill/soft_loss", "distill/task_loss"}
    assert Distillation(DistillConfig(teacher="t")).figures() == {}


class Parts(nn.Module):
    """A student whose loss may be computed past its forward, and one of whose layers may not run."""

    def __init__(self, calls=("first", "second"), seed=0, classes=3):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.third = nn.Linear(4, 5), nn.Linear(5, classes), nn.Linear(5, classes)
        self.calls = calls

    def forward(self, x, labels=None):
        for name in self.calls:
            x = getattr(self, name)(x)
        return {"logits": x}


def calls_parts(model, x, y):
    return F.cross_entropy(model.second(model.first(x)), y)


def calls(model, x, y):
    return F.cross_entropy(model(x)["logits"], y)


def calls_without_gradients(model, x, y):
    with torch.no_grad():
        model(x)
    return calls_parts(model, x, y)


def calls_in_eval_mode(model, x, y):
    model.eval()
    loss = calls(model, x, y)
    model.train()
    return loss


def cached_elsewhere(folder):
    write_teacher_cache(nn.Linear(4, 3), [torch.randn(2, 4)], folder, temperature=2.0)
    return f"cache:{folder}"


LATE = {
    "forward that is not called": (calls_parts, {}, "was not seen.*set distill.student"),
    "forward without gradients": (calls_without_gradients, {}, "ran without gradients only.*CachedMultipleNegatives"),
    "forward in eval mode": (calls_in_eval_mode, {}, r"ran in eval mode only.*train\(\)"),
    "other inputs of the teacher": (calls, {"teacher": nn.Sequential(nn.Linear(7, 3))}, "teacher must compute from"),
    "other classes": (calls, {"teacher": Parts(classes=4)}, "as many classes as the student, 3, got 4"),
    "another name": (calls, {"logits": "scores"}, "must hold logits under 'scores'"),
    "a hidden layer that does not run": (calls, {"hidden": ["third=first"]}, "module third of the student must run"),
    "hidden layers of other shapes": (calls, {"hidden": ["first=twice"]}, "must have the teacher's shape"),
    "attention that does not run": (calls, {"attention": ["third=first"]}, "module third of the student must run"),
    "examples that are not told": (calls, {"unlabeled_field": "new"}, "unlabeled_field 'new' must be"),
    "examples that are not cached": (calls, {"teacher": cached_elsewhere}, "examples of a batch are not in"),
}


class Twice(Parts):
    def __init__(self):
        super().__init__(seed=1)
        self.twice = nn.Identity()

    def forward(self, x, labels=None):
        return {"logits": self.second(self.twice(self.first(x).repeat(2, 1))[: len(x)])}


@pytest.mark.parametrize("begin", [0, 100])
@pytest.mark.parametrize("cause", LATE)
def test_what_cannot_be_distilled_is_refused_in_the_first_micro_batch(cause, begin, tmp_path):
    step, options, message = LATE[cause]
    options = {"teacher": Twice(), **options}
    if callable(options["teacher"]) and not isinstance(options["teacher"], nn.Module):
        options["teacher"] = options["teacher"](tmp_path)
    model = Parts()
    session = Session({"distill": {**options, "begin": begin}})
    session.attach(model)
    session.begin([torch.optim.SGD(model.parameters())], total_steps=200)
    with pytest.raises(EffError, match=message):
        session.loss(step(model, torch.randn(6, 4), torch.zeros(6, dtype=torch.long)))


def test_options_that_move_need_a_length_from_the_start():
    model = Parts()
    session = Session({"distill": {"teacher": Parts(seed=1), "begin": 100, "alpha_end": 1.0}})
    session.attach(model)
    with pytest.raises(ConfigError, match="need a run of known length"):
        session.begin([torch.optim.SGD(model.parameters())], total_steps=None)


def test_looking_ahead_changes_no_loss_and_happens_once():
    asked, teacher = [], Parts(seed=1)
    teacher.register_forward_hook(lambda *_: asked.append(None))
    model, x, y = Parts(), torch.randn(6, 4), torch.zeros(6, dtype=torch.long)
    session = Session({"distill": {"teacher": teacher, "begin": 2, "hidden": ["first=first"]}})
    session.attach(model)
    session.begin([torch.optim.SGD(model.parameters())], total_steps=4)
    for step in range(4):
        task = calls(model, x, y)
        assert (session.loss(task) is task) == (step < 2)
        assert len(asked) == (1 if step < 2 else step)
        assert bool(session.figures()) == (step >= 2)
        session.after_step()
    assert session.receipt().values["techniques"]["distill"]["batches"] == 2
    session.detach()


def test_a_preview_names_the_student():
    found = explain(Recipe.from_dict({"distill": {"teacher": "not/loaded"}}), model=nn.Linear(4, 2)).touched["distill"]
    assert (found.what, dict(found.tensors)) == ("student", {"Linear": 10})
