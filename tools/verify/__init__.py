"""`penstock verify`: does a checkpoint give here what it gives in transformers?"""
