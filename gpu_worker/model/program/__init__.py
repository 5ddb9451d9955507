"""A transformers model as a flat program of the native library, with buffers bound once."""
