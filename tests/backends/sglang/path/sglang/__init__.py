"""A stand-in for SGLang where only its server is looked at from outside: fake_engine.py behind its command line."""
