"""Under Lightning: the module, its optimizer steps, and what of it is kept."""
