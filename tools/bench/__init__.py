"""`penstock bench`: repeatable measurements of this machine.

Every figure is the median of rounds, with the least and the greatest beside it. Compared sides
alternate within a round, so a machine that slows down slows both. Each report states the load of
other processes.
"""
