from .config import LoraConfig as LoraConfig
from .technique import Lora as Lora
