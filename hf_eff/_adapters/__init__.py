"""What the Trainer must do for one technique, or around trainers of another library; drivers ask whoever is here."""
