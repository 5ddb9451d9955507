"""Records of batches and files in Redis, bodies of files, and what is to be deleted."""
