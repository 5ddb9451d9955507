"""`penstock verify`: does a checkpoint give here what it gives in transformers?"""

from .verification import VerifyOptions, verify_model

__all__ = ["VerifyOptions", "verify_model"]
