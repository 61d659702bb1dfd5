"""Tools for after training: export, quantization, removal, compression, planning."""
