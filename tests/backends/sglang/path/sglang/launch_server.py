"""A stand-in for `python -m sglang.launch_server`, with a child process, and faults on request of the environment."""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.backends.sglang.fake_engine import FakeEngine


class Refusing(FakeEngine):
    """Refuses rollouts and dies half a second later; the next one does not."""

    def on_generate(self, content):
        if content.get("rid", "").startswith("proof") or "custom_params" not in content["sampling_params"]:
            return super().on_generate(content)
        Path(os.environ["FAKE_ONCE"]).touch()
        threading.Timer(0.5, os._exit, (7,)).start()
        return 500, {"error": {"message": "shutting down"}}


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
    kind = Refusing if fault == "refuses and dies" and not Path(os.environ["FAKE_ONCE"]).exists() else FakeEngine
    engine = kind(port=arguments.port, max_running=4, token_s=float(os.environ.get("FAKE_TOKEN_S", "0")))
    engine.serve_forever()


if __name__ == "__main__":
    main()
