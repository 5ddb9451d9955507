"""The tensors of the paged KV cache, on the device and on the host."""
