"""`penstock bench`: what this machine gives, measured so that others can measure it again.

Every figure is the median of rounds, with the least and the greatest beside it; what is compared
alternates within a round, so that a machine that slows down slows both. Each report says what else
the machine did meanwhile.
"""
