"""What a Lightning Trainer must do for one technique; drivers ask whoever is here."""
