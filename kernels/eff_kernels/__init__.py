"""One public function per op: a torch path checked against float64, and a Triton path on CUDA where it is faster."""
