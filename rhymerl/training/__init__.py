"""Training under Lightning: the module, its optimizer steps, and what of it is kept."""
