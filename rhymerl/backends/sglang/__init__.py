"""The SGLang backend (backend.py), and what SGLang's own processes run of it (plugin/)."""
