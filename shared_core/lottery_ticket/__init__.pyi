from .config import LotteryConfig as LotteryConfig
from .technique import LotteryTicket as LotteryTicket
from .ticket import Ticket as Ticket
from .ticket import read_ticket as read_ticket
from .ticket import write_ticket as write_ticket
