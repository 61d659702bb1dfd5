"""One public function an op: a float64-checked torch path everywhere, a Triton path on CUDA where it wins."""
