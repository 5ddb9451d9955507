"""KV blocks: allocation, sharing, the prefix cache, and swapping to host memory."""
