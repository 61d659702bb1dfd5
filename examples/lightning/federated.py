"""Federated averaging: five clients with two digits each, who share weights and never images, against one who has all.

McMahan et al., 2017, arXiv:1602.05629: in every round each client trains the server's weights on its own images, and
the server averages what comes back, weighted by how many images each has.
Data: the 1,797 handwritten digits of scikit-learn. Run: python examples/lightning/federated.py
"""

import pytorch_lightning as pl
import torch
from digits_lightning import QUIET, Classifier, digits
from torch.utils.data import DataLoader, TensorDataset

from shared_core.soup import uniform_soup

ROUNDS = 15


class Client(Classifier):
    def configure_optimizers(self):
        # moments of Adam that start anew in every round would drive clients with other digits further apart
        return torch.optim.SGD(self.parameters(), lr=0.5)


def train_locally(weights, images, round_number):
    """Return what one client sends back: its weights after one epoch of its own training."""
    client = Client()
    client.load_state_dict(weights)
    torch.manual_seed(round_number)
    pl.Trainer(max_epochs=1, **QUIET).fit(client, DataLoader(images, batch_size=32, shuffle=True))
    return client.state_dict()


def accuracy_of(weights, test):
    model = Client()
    model.load_state_dict(weights)
    return model.accuracy(test)


if __name__ == "__main__":
    loader, test = digits()
    x, y = loader.dataset.tensors
    clients = [TensorDataset(x[y // 2 == client], y[y // 2 == client]) for client in range(5)]
    server = central = Client().state_dict()
    for round_number in range(ROUNDS):
        returned = [train_locally(server, images, round_number) for images in clients]
        server = uniform_soup(returned, weights=[len(images) for images in clients])
        central = train_locally(central, loader.dataset, round_number)
    alone = max(accuracy_of(weights, test) for weights in returned)
    print(
        f"accuracy after {ROUNDS} rounds of {len(clients)} clients: best alone {alone:.3f}, "
        f"federated {accuracy_of(server, test):.3f}, all images in one place {accuracy_of(central, test):.3f}"
    )
