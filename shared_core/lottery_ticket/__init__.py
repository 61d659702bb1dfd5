"""Lottery tickets: sparse networks that train as well as the dense ones, when they start from the right weights."""

from typing import TYPE_CHECKING

from shared_core.lazy_exports import export_lazily

if TYPE_CHECKING:
    from shared_core.lottery_ticket.config import LotteryConfig as LotteryConfig
    from shared_core.lottery_ticket.curve import TicketCurve as TicketCurve
    from shared_core.lottery_ticket.search import LotterySearch as LotterySearch
    from shared_core.lottery_ticket.technique import LotteryTicket as LotteryTicket
    from shared_core.lottery_ticket.ticket import Ticket as Ticket
    from shared_core.lottery_ticket.ticket import read_ticket as read_ticket
    from shared_core.lottery_ticket.ticket import write_ticket as write_ticket

export_lazily(__name__)
