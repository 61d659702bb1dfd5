"""Steps with chosen gradients and losses, of a scaler alone and of a session, that the tests of loss scaling share."""

import torch
from plain_loop import backward, update

from shared_core import Session
from shared_core.loss_scaling import LossScaler

INF, NAN = float("inf"), float("nan")


class Loop:
    """Two parameters, their optimizer and a scaler."""

    def __init__(self, fused=False, unscale=False, **options):
        self.weight, self.other = (torch.nn.Parameter(torch.zeros(size)) for size in (3, 2))
        self.unscale = unscale
        self.optimizer = torch.optim.AdamW([self.weight, self.other], lr=0.01, fused=fused)
        self.scaler = LossScaler(**options)

    def step(self, amax=1.0, bad=0.0, loss=1.0):
        """Step with gradients of at most `amax`, one of them `bad` (true: infinite); return the next scale."""
        self.scaler.scale(torch.tensor(loss))
        self.weight.grad = torch.tensor([amax / 3, -amax, INF if bad == 1 else float(bad)]) * self.scaler._scale
        self.other.grad = torch.tensor([amax / 7, 0.0]) * self.scaler._scale
        if self.unscale:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_([self.weight, self.other], 1e-6)  # must not change what is measured
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale()


def batch(index, size=4):
    return torch.randn(size, 6, generator=torch.Generator().manual_seed(index))


class SessionLoop:
    """A session with loss scaling over a model of six inputs."""

    def __init__(self, model, state=None, **options):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.session = Session({"loss_scale": {"kind": "dynamic", **options}})
        self.session.attach(model)
        if state is not None:
            self.session.load_state_dict(state)
        self.session.begin([self.optimizer], total_steps=20)
        self.technique = self.session.techniques["loss_scale"]

    def backward(self, index):
        backward(self.session, self.session.loss(self.model(batch(index)).square().mean()))

    def step(self, index=None, bad=False):
        if index is not None:
            self.backward(index)
        if bad:
            next(self.model.parameters()).grad.view(-1)[0] = INF
        update(self.session, self.optimizer)
