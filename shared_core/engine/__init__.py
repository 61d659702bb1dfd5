"""The frame: techniques, the session that drives them, recipes, receipts."""
