"""What a Lightning Trainer must do for a technique: a module each; drivers call all."""
