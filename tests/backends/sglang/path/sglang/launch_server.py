"""As `python -m sglang.launch_server`, with a child of its own, and faults that the environment asks for."""

import argparse
import os
import signal
import subprocess
import sys
import time

from tests.backends.sglang.fake_engine import FakeEngine


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    arguments, others = parser.parse_known_args()
    print("arguments:", *others, flush=True)
    fault = os.environ.get("FAKE_FAULT")
    if fault == "dies":
        print("no memory left", flush=True)
        sys.exit(3)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdin=subprocess.DEVNULL)
    print(f"child {child.pid}", flush=True)
    if fault == "hangs":
        time.sleep(600)
    if fault == "clings":  # to life
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    engine = FakeEngine(port=arguments.port, max_running=4, token_s=float(os.environ.get("FAKE_TOKEN_S", "0")))
    engine.serve_forever()


if __name__ == "__main__":
    main()
