"""What happens after training: export, quantization, removal, compression, planning."""
