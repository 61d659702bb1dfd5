"""What is looked at before, during and after training, so that a run is what was asked for or is refused."""
