"""L3, each rank: the ledger of token slots and cached prefixes. Numpy and standard library; imports nothing of ours."""

from radix.check import LedgerError, check_ledger
from radix.ledger import Ledger, Tenancy
from radix.outline import outline
from radix.radix_cache import PageObserver
from radix.trunks import Trunk

__all__ = ["Ledger", "LedgerError", "PageObserver", "Tenancy", "Trunk", "check_ledger", "outline"]
