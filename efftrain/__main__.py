"""Run `eff` as `python -m efftrain`, for launchers that start modules: `torchrun ... -m efftrain run train.py`."""

from shared_core.cli import main

if __name__ == "__main__":
    main()
