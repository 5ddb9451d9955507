"""OpenAI's Responses API: answers that are stored, continued, and read from any event on.

A response is its request in the queue. The request's note holds what the client asked for and the
conversation before it; the token log holds the output. So any gateway answers for any response.
"""
