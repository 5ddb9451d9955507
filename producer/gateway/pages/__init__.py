"""Pages beside OpenAI's endpoints: models, health, metrics, tokens, usage, and the API itself."""
