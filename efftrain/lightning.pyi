from lightning_eff import *  # noqa: F403
