"""Files that run code when they are unpickled: each would make the folder `canary`."""

import functools
import io
import os
import pickle
import tarfile
import zipfile

import numpy as np
import torch


class Reduce:
    """`__reduce__`, or `__reduce_ex__`, that calls a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


class State:
    """Its state calls: a partial takes the function by `__setstate__`, and is called after."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        items = [("state", Reduce(functools.partial, os.mkdir)), ("call", Reduce(os.mkdir, self.canary))]
        return (dict, (), None, None, iter(items))


def getattr_chain(canary):
    """``getattr(__import__('os'), 'mkdir')(canary)`` without a name of os."""
    module = b"cbuiltins\n__import__\n(Vos\ntR"
    return b"cbuiltins\ngetattr\n(" + module + b"Vmkdir\ntR(V" + canary.encode() + b"\ntR."


def saved(value, **options):
    """What `torch.save` writes."""
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def archive(pickled):
    """A file of `torch.save` whose pickle is another."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved({"w": torch.ones(2)}))) as whole, zipfile.ZipFile(stream, "w") as made:
        for name in whole.namelist():
            made.writestr(name, pickled if name.endswith("data.pkl") else whole.read(name))
    return stream.getvalue()


def legacy_tar(pickled):
    """The format of torch 0.1: a tar of pickles."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name in ("storages", "tensors", "pickle", "sys_info"):
            info = tarfile.TarInfo(name)
            info.size = len(pickled)
            tar.addfile(info, io.BytesIO(pickled))
    return stream.getvalue()


def object_array(canary, zipped):
    """A numpy file of objects, which numpy stores as a pickle."""
    stream, array = io.BytesIO(), np.array([Reduce(os.mkdir, canary)], dtype=object)
    np.savez(stream, x=array) if zipped else np.save(stream, array, allow_pickle=True)
    return stream.getvalue()


def gadgets(canary):
    """The bytes of each, by name."""
    canary = str(canary)
    call = Reduce(os.mkdir, canary)
    return {
        "reduce": pickle.dumps(call),
        "reduce_ex": pickle.dumps(call, protocol=5),
        "setstate": pickle.dumps(State(canary)),
        "getattr": getattr_chain(canary),
        "exec": pickle.dumps(
            Reduce(exec, f"import os; os.mkdir({canary!r})")
        ),  # as dill and cloudpickle build functions
        "torch": saved({"state_dict": {"w": torch.ones(2)}, "x": call}),
        "torch legacy": saved({"w": torch.ones(2), "x": call}, _use_new_zipfile_serialization=False),
        "torch tar": legacy_tar(pickle.dumps(call)),
        "torch archive": archive(getattr_chain(canary)),
        "storage": archive(pickle.dumps(Reduce(torch.storage._load_from_bytes, saved(call)))),
        "rebuild": archive(pickle.dumps(Reduce(torch._utils._rebuild_parameter, call, True, {}))),
        "numpy": object_array(canary, zipped=False),
        "numpy zip": object_array(canary, zipped=True),
    }
