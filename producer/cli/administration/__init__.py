"""Commands of operators: API keys, dead letters, tenants with an ingress stream, usage."""
