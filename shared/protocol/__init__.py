"""What travels over Redis: requests in, chunks and ends out, and their closed sets of values.

Import each name from the module that defines it: ``request``, ``events``, ``event_reader``,
``states``, ``sampling_options``, ``choice_parts``, ``chat.chat_options``, ``chat.deltas``.
"""
