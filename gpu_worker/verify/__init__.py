"""`penstock verify`: does a checkpoint give here what it gives in transformers?"""

from .report import Check, Report
from .verification import VerifyOptions, verify_model

__all__ = ["Check", "Report", "VerifyOptions", "verify_model"]
