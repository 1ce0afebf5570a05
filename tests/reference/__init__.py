"""Plain references: float64, a dozen obvious lines each, no code of flatmin's."""
