"""A forward pass: the packed step, what attention needs of it, and attention over paged KV."""
