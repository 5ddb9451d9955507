"""In which order waiting sequences are admitted: one interface, and a class for each order.

``policy`` is the interface and says what every order must keep. ``fcfs`` and ``fair`` have queues
of their own; ``sjf``, ``edf`` and ``priority`` only say where a sequence stands (``ranked``).
"""
