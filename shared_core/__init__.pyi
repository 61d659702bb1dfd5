from .engine.recipe import Recipe as Recipe
from .engine.session import Session as Session
from .errors import EffError as EffError
