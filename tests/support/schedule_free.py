"""An optimizer with modes: it trains at y, between z, which takes the steps, and x, their average."""

import torch


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD (Defazio et al. 2024, arXiv:2405.15682): ``y = βx + (1-β)z`` to train, x to evaluate."""

    def __init__(self, parameters, lr=0.1, beta=0.9):
        super().__init__(parameters, {"lr": lr, "beta": beta, "k": 0, "train_mode": True})

    @torch.no_grad()
    def _move(self, train):
        for group in self.param_groups:
            share = 1 - group["beta"] if train else 1 - 1 / group["beta"]
            for weight in group["params"] if group["train_mode"] != train else ():
                if "z" in self.state[weight]:
                    weight.lerp_(self.state[weight]["z"], share)
            group["train_mode"] = train

    def train(self):
        self._move(True)

    def eval(self):
        self._move(False)

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            assert group["train_mode"], "a step in the mode of evaluation"
            share, beta, lr = 1 / (group["k"] + 1), group["beta"], group["lr"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                z = self.state[weight].setdefault("z", weight.detach().clone())
                weight.lerp_(z, share)
                weight.add_(weight.grad, alpha=lr * (beta * (1 - share) - 1))
                z.sub_(weight.grad, alpha=lr)
            group["k"] += 1
        return loss
