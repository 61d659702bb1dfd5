"""What the Trainer must do for a technique, or for a trainer of another library: a module each; drivers call all."""
