"""Classifiers in ONNX files, in onnxruntime: which answers are right, and how long they take."""

import statistics
import time

import numpy as np
import onnxruntime


def sessions_of(files):
    """Return a session of one thread for each file."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    # onnxruntime 1.31's fused sum and norm takes several times as long as the two that it replaces
    settings = {"providers": ["CPUExecutionProvider"], "disabled_optimizers": ["SkipLayerNormFusion"]}
    return [onnxruntime.InferenceSession(file, options, **settings) for file in files]


def batches_of(examples, collate, size=64):
    """Return the examples as batches of arrays."""
    return [
        collate([examples[i] for i in range(start, min(start + size, len(examples)))])
        for start in range(0, len(examples), size)
    ]


def hits_of(session, batches):
    """Return 1 where the file's answer is right, and 0 where it is not."""
    names = {entry.name for entry in session.get_inputs()}
    found = [
        session.run(["logits"], {name: batch[name] for name in names})[0].argmax(-1) == batch["labels"]
        for batch in batches
    ]
    return np.concatenate(found).astype(float)


def milliseconds(sessions, batch, rounds):
    """Return the median time of each for this batch, by turns.

    It is the time of this thread, which does all the work: latency, without what other programs take of the machine.
    """
    names = {entry.name for entry in sessions[0].get_inputs()}
    inputs, times = {name: batch[name] for name in names}, [[] for _ in sessions]
    for _ in range(rounds):
        for session, taken in zip(sessions, times, strict=True):
            start = time.thread_time()
            session.run(None, inputs)
            taken.append(1000 * (time.thread_time() - start))
    return [statistics.median(taken[rounds // 10 :]) for taken in times]
