"""L3, each rank: the ledger of token slots and cached prefixes. Numpy and standard library; imports nothing of ours."""

from radix.check import LedgerError, check_ledger
from radix.ledger import Ledger, Tenancy

__all__ = ["Ledger", "LedgerError", "Tenancy", "check_ledger"]
