from hf_eff import *  # noqa: F403
