"""What a trainer must do for one technique."""
