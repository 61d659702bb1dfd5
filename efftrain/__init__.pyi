from shared_core import EffError as EffError
from shared_core import Recipe as Recipe
from shared_core import Session as Session
from shared_core import register as register
from shared_core import training as training

from . import hf as hf
from . import lightning as lightning

__version__: str
