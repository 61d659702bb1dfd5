"""Communication between processes, and sharded tensors."""
