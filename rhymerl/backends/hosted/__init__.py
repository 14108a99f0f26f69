"""Engines apart from the trainer's ranks, each in a host that answers requests on its own."""
