"""Runs code that nobody has read, in a process that can compute and nothing else.

    caller ── run.py ── keeps ──> forkserver.py (a fresh interpreter without environment, warm)
                                    └─ forks for each answer ─> warden.py
                                         │ enters new namespaces, keeps the time
                                         └─> examiner.py, process 1 of them: has the tests, judges
                                               └─> answer.py: has the code; a system call filter and limits

The code never sees the tests: its functions are called through a pipe (remote.py), and only plain values come back. The
warm process sees neither: what it forks reads them.

All but run.py is imported by the fresh interpreter, as a package of its own: cheap modules of the standard library
only, and imports among them are relative. verifier.py, which is not cheap, is imported where it is asked for.
"""
