"""Workers apart from the trainer's ranks: how they are brought up, spoken with and replaced."""
