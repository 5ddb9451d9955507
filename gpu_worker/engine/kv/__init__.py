"""Who owns which KV block: allocation, sharing, the prefix cache, and blocks on the host."""
