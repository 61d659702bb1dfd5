"""No training and no command of these tests may look for anything on the network."""

import socket

import pytest


class NetworkError(BaseException):
    """Asked the network; no `except Exception` hides it."""


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise NetworkError(f"asked the network: {args}")

    for name in ("connect", "connect_ex", "sendto"):
        original = getattr(socket.socket, name)

        def local(self, *args, original=original):
            return original(self, *args) if self.family == socket.AF_UNIX else refuse(*args)

        monkeypatch.setattr(socket.socket, name, local)
    for name in ("getaddrinfo", "gethostbyname", "create_connection"):
        monkeypatch.setattr(socket, name, refuse)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Loops without an output folder write their receipts into the folder that they start in."""
    monkeypatch.chdir(tmp_path)
