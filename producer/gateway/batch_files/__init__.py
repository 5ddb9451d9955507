"""OpenAI's files and batches by HTTP; ``penstock batches`` drives what is started here."""
